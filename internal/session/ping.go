package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/internal/keys"
	"github.com/e51fe0e6/dsync/scripts"
)

const (
	pingBound = 5 * time.Second
	pingLease = time.Second
	clockSlip = 100 * time.Millisecond // of the server's clock against ours during a ping; more is no scheduling noise
)

// Ping tries everything that a lock needs on a name of its own, and returns an error that says what is missing. The name is
// gone a minute later.
func (s *Session) Ping(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, pingBound)
	defer cancel()
	p := &pinger{
		s: s, id: s.id + "-ping", generation: random(8), nonce: random(8),
		events: make(chan driver.Event, 8),
	}
	p.e = &entry{s: s, key: keys.For(s.cfg.Prefix, "ping:"+s.id, "mutex"), script: scripts.Mutex}
	if err := p.scripts(ctx, ""); err != nil {
		return err
	}
	return p.channel(ctx)
}

type pinger struct {
	s          *Session
	e          *entry
	id         string
	generation string
	nonce      string
	events     chan driver.Event
}

// scripts runs acquire, renew and release, with an echo if nonce is not empty, and watches the server's clock meanwhile.
func (p *pinger) scripts(ctx context.Context, nonce string) error {
	began := p.s.watch.now()
	first, flags, err := p.run(ctx, nonce, &claim.Command{Verb: claim.Acquire, Ask: p.generation, Wait: true})
	if errors.Is(err, ErrUnavailable) {
		return err
	}
	if err != nil {
		return fmt.Errorf("the acquiring script does not run; the user needs EVALSHA, EVAL and the commands %q on the keys %s:*: %w",
			scripts.Commands, p.s.cfg.Prefix, err)
	}
	renewed, _, err := p.run(ctx, "", &claim.Command{Verb: claim.Renew, End: p.generation})
	if err != nil {
		return fmt.Errorf("the renewing script does not run: %w", err)
	}
	passed, here := renewed.End.ServerTime-first.Ask.ServerTime, p.s.watch.now()-began
	if _, _, err := p.run(ctx, "", &claim.Command{Verb: claim.Release, End: p.generation}); err != nil {
		return fmt.Errorf("the releasing script does not run: %w", err)
	}
	p.generation = random(8)
	if passed < -clockSlip || passed > here+clockSlip {
		return fmt.Errorf("the server's clock moved by %v while %v passed here; leases are measured by it and must not jump", passed, here)
	}
	if nonce != "" && flags&scripts.FlagMute != 0 {
		return fmt.Errorf("scripts may not publish on %s; the user needs PUBLISH and the channels &%s:*", p.s.channels+p.id, p.s.cfg.Prefix)
	}
	return nil
}

func (p *pinger) run(ctx context.Context, nonce string, cmd *claim.Command) (claim.Reply, int64, error) {
	cmd.TTL, cmd.Life = pingLease, pingLease
	dc := p.s.encode(p.e, cmd, nonce, false)
	for i, generation := range []string{cmd.End, cmd.Ask} {
		if generation != "" {
			dc.Args[1+i] = p.id + ":" + generation // answered on a channel of its own
		}
	}
	r, err := p.s.cfg.Driver.Exec(ctx, dc)
	rep, flags := decode(cmd, r, err)
	return rep, flags, Explain(rep.Err)
}

// channel subscribes to a channel beside the client's and has a script publish there.
func (p *pinger) channel(ctx context.Context) error {
	channel := p.s.channels + p.id
	need := fmt.Sprintf("the user needs SUBSCRIBE and the channels &%s:*; without, waiters are served by re-checks only", p.s.cfg.Prefix)
	session, err := p.s.cfg.Driver.OpenSession(ctx, func(ev driver.Event) { offer(p.events, ev) })
	if err != nil {
		return fmt.Errorf("no subscription can be opened; %s: %w", need, Explain(err))
	}
	defer func() { _ = session.Close() }()
	if err := session.Subscribe(channel); err != nil {
		return fmt.Errorf("the channel %s is refused; %s: %w", channel, need, err)
	}
	for {
		select {
		case ev := <-p.events:
			switch ev.Kind {
			case driver.Subscribed:
				if err := p.scripts(ctx, p.nonce); err != nil {
					return err
				}
			case driver.Message:
				if m, ok := parse(ev.Payload); ok && m.kind == 'e' && m.nonce == p.nonce {
					return nil
				}
			case driver.Refused:
				return fmt.Errorf("the channel %s is refused; %s: %w", channel, need, ev.Err)
			case driver.Down:
				return fmt.Errorf("the subscription broke: %w", errors.Join(ErrUnavailable, ev.Err))
			case driver.Unsubscribed, driver.Pong:
			}
		case <-ctx.Done():
			return fmt.Errorf("what a script published on %s did not come back: %w", channel, Ended(ctx))
		}
	}
}
