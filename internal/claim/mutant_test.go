package claim

import (
	"slices"
	"testing"
	"time"
)

// mutants are deliberate faults, put in around the claim: each stands for a line of it, of the scripts or of the session that
// somebody may one day find superfluous. Not among them is what has a second line behind it: a repeated acquire that does not say so is
// harmless as long as a message's grant is counted by the server's clock.
var mutants = []mutant{
	{name: "validity-counts-from-the-reply", reply: func(w *world, x *wire, _ *Reply) { x.cmd.SentAt = w.now }},
	{name: "message-counts-from-its-arrival", note: func(w *world, m *mail) {
		if g := m.to.claim.gen; g != nil && g.token == m.token && g.phase != held {
			g.firstSent, g.lastSent, g.lastServer = w.now, w.now, m.serverTime
		}
	}},
	{name: "grant-of-another-generation-counts", note: func(_ *world, m *mail) {
		if g := m.to.claim.gen; g != nil {
			m.token, m.fence = g.token, m.fence+1e6
		}
	}},
	{name: "no-margin", after: func(w *world, p *process) {
		if g := p.claim.gen; g != nil && g.phase == held && g.renewAt > w.now {
			g.validUntil = max(g.validUntil, g.renewAt-g.ttl/3+g.ttl)
		}
	}},
	{name: "no-tombstone", command: func(c *Command) { c.Tombstone = false }},
	{name: "gone-is-ignored", reply: func(_ *world, _ *wire, r *Reply) {
		if r.Ask.Status == Gone {
			r.Ask.Status = Queued
		}
	}},
	{name: "not-yours-is-ignored", reply: func(_ *world, x *wire, r *Reply) {
		if x.cmd.Verb == Renew && r.Class == Answered && r.End.Status == NotYours {
			r.End.Status, r.End.Remaining = Renewed, x.cmd.TTL
		}
	}},
	{name: "no-re-check", after: func(_ *world, p *process) {
		if g := p.claim.gen; g != nil && g.phase == queued {
			g.recheckAt = max(g.recheckAt, 1000*time.Hour)
		}
	}},
	{name: "fences-used-are-not-told", command: func(c *Command) { c.Used = 0 }},
	{name: "release-of-the-lost-is-forgotten", after: func(_ *world, p *process) {
		p.claim.ends = slices.DeleteFunc(p.claim.ends, func(e *ending) bool { return e.sent == 0 && e.confirm == nil })
	}},
	{name: "unanswered-acquire-is-forgotten", after: func(_ *world, p *process) {
		p.claim.ends = slices.DeleteFunc(p.claim.ends, func(e *ending) bool { return e.sent == 0 && !e.answered })
	}},
	{name: "local-hand-over-keeps-its-fence", after: func(_ *world, p *process) {
		if g := p.claim.gen; g != nil && g.phase == held && p.claim.user != nil {
			g.usedFence = g.grantFence
		}
	}},
	{name: "expired-user-goes-on", after: func(w *world, p *process) {
		if g := p.claim.gen; g != nil && g.phase == held && p.claim.user != nil {
			g.validUntil = max(g.validUntil, w.now+g.ttl)
		}
	}},
	{name: "back-off-without-end", after: func(w *world, p *process) {
		if p.claim.failures > 2 {
			p.claim.retryAt = max(p.claim.retryAt, w.now+time.Hour)
		}
	}},
	{name: "server-grants-over-a-holder", server: func(s *server) {
		if len(s.queue) > 0 {
			s.holder = ""
		}
	}},
	{name: "server-renews-from-the-old-deadline", server: func(s *server) { s.till -= 40 }},
	{name: "server-does-not-count-what-expired", server: func(s *server) { s.from = max(s.from, s.till*1000-1) }},
}

// The explorer bites: it finds each of the faults within a number of seeds.
func TestExploreFindsEachMutant(t *testing.T) {
	t.Parallel()
	const seeds = 3000
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			for seed := range uint64(seeds) {
				if w, _ := explore(seed, m, false); w.broken != "" {
					t.Logf("seed %d: %s", seed, w.broken)
					return
				}
			}
			t.Errorf("%d seeds have not found it", seeds)
		})
	}
}
