package scripts_test

import (
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/e51fe0e6/dsync/internal/redistest"
	"github.com/e51fe0e6/dsync/scripts"
)

func listening(t *testing.T, server *redistest.Server) *fixture {
	t.Helper()
	f := connect(t, server.Addr())
	f.listen()
	return f
}

// every runs body for every verb in every state of the table, each on a name of its own with the connections of all; want is the table's cell.
func every(t *testing.T, all *fixture, body func(f *fixture, seed func(f *fixture), verb, want string)) {
	t.Helper()
	for _, row := range states {
		t.Run(row.name, func(t *testing.T) {
			want := cells(row.want)
			for verb := range verbs {
				t.Run(verb, func(t *testing.T) {
					body(all.another(t), row.seed, verb, want[verb])
				})
			}
		})
	}
}

// refusals runs every verb in every state on a server that refuses writes, and wants the refusal, the state as it was, and nothing
// published. spoil is called between the seed and the verb, and heal behind it.
func refusals(t *testing.T, server *redistest.Server, code string, spoil, heal func(f *fixture)) {
	t.Helper()
	every(t, listening(t, server), func(f *fixture, seed func(f *fixture), verb, want string) {
		seed(f)
		spoil(f)
		defer heal(f)
		before := f.state().String()
		r := f.ask(verbs[verb])
		switch {
		case strings.HasPrefix(want, "error"):
			if !strings.Contains(r.err, "WRONGTYPE") {
				f.Errorf("%v %s, want WRONGTYPE", r, r.err)
			}
		case verb == "inspect":
			if r.err != "" {
				f.Errorf("inspect writes: %s", r.err)
			}
		case !strings.Contains(r.err, code):
			f.Errorf("%v %s, want %s", r, r.err, code)
		}
		if after := f.state().String(); after != before {
			f.Errorf("stored %s, and before %s", after, before)
		}
		if got := f.messages(); len(got) > 0 {
			f.Errorf("published %q", got)
		}
	})
}

// TestDemotedPrimaryDecidesAndPublishesNothing: a subscriber is still connected to what is a replica now.
func TestDemotedPrimaryDecidesAndPublishesNothing(t *testing.T) {
	server := redistest.Start(t)
	refusals(t, server, "READONLY",
		func(f *fixture) { f.do("REPLICAOF", "127.0.0.1", "1") }, // nobody is there, so the data stays
		func(f *fixture) { f.do("REPLICAOF", "NO", "ONE") })
}

func TestReplicaDecidesNothing(t *testing.T) {
	primary := redistest.Start(t)
	replica := redistest.StartReplica(t, primary)
	onReplica := listening(t, replica)
	every(t, listening(t, primary), func(f *fixture, seed func(f *fixture), verb, want string) {
		seed(f)
		redistest.WaitFor(f, "the replica", func() bool { return f.do("WAIT", "1", "100") == int64(1) })
		there := onReplica.another(f.T)
		there.key, there.channels = f.key, f.channels
		r := there.ask(verbs[verb])
		if fine := verb == "inspect" || strings.HasPrefix(want, "error"); !fine && !strings.Contains(r.err, "READONLY") {
			f.Errorf("%v %s, want READONLY", r, r.err)
		}
		if got := there.messages(); len(got) > 0 {
			f.Errorf("published %q", got)
		}
	})
}

func TestTooFewReplicasRefuseEverythingAndChangeNothing(t *testing.T) {
	server := redistest.Start(t)
	refusals(t, server, "NOREPLICAS",
		func(f *fixture) { f.do("CONFIG", "SET", "min-replicas-to-write", "1") },
		func(f *fixture) { f.do("CONFIG", "SET", "min-replicas-to-write", "0") })
}

// TestGrantIsWrittenBeforeItIsPublished on a server whose memory is full: what asks for something new is refused with nothing written, and
// everything else goes on as if it were not, to the grants inside.
func TestGrantIsWrittenBeforeItIsPublished(t *testing.T) {
	server := redistest.Start(t, redistest.WithConfig("maxmemory-policy", "noeviction"))
	refused := 0
	every(t, listening(t, server), func(f *fixture, seed func(f *fixture), verb, want string) {
		seed(f)
		f.do("CONFIG", "SET", "maxmemory", "1")
		defer f.do("CONFIG", "SET", "maxmemory", "0")
		got := f.twice(func(*fixture) {}, verbs[verb])
		if asksAnew := verb == "wait" || verb == "try"; asksAnew && strings.HasPrefix(got, "error") {
			if !strings.HasPrefix(want, "error") {
				refused++
			}
			if r := f.ask(verbs[verb]); !strings.Contains(r.err, "OOM") && !strings.Contains(r.err, "WRONGTYPE") {
				f.Errorf("refused with %s, want OOM", r.err)
			}
			return
		}
		if got != want {
			f.Errorf("\n got %s\nwant %s", got, want)
		}
	})
	if refused == 0 {
		t.Error("nothing was refused: the memory was not full")
	}
}

func TestFullMemoryRefusesNoRenewalReleaseOrHeartbeat(t *testing.T) {
	server := redistest.Start(t, redistest.WithConfig("maxmemory-policy", "noeviction"))
	f := listening(t, server)
	f.ask(acquire(other, "w"))
	f.ask(acquire(me, "w"))
	f.ask(acquire(next, "w"))
	f.messages()
	f.do("CONFIG", "SET", "maxmemory", "1")
	for _, step := range []struct {
		q     question
		want  string
		state string
	}{
		{acquire("lt:1", "w"), "error", "h=ot:1 q=me:1 q=nx:1"},
		{acquire("lt:1", ""), "busy+waiting", "h=ot:1 q=me:1 q=nx:1"},
		{renew(other), "renewed+waiting", "h=ot:1 q=me:1 q=nx:1"},
		{acquire(me, "wr"), "queued#1+waiting", "h=ot:1 q=me:1 q=nx:1"},
		{release(other, "t", ""), "released+waiting", "h=me:1 q=nx:1 x=ot:1"},
		{release(me, "w", again), "released+waiting,queued#1+waiting", "h=nx:1 q=me:2 x=ot:1"},
		{release(again, "", ""), "withdrawn+waiting", "h=nx:1 x=ot:1"},
		{release(next, "", ""), "released", "x=ot:1"},
		{acquire("lt:1", "w"), "error", "x=ot:1"},
		{acquire("lt:1", ""), "error", "x=ot:1"},
	} {
		if got := f.ask(step.q).String(); got != step.want {
			t.Errorf("%+v: %s, want %s", step.q, got, step.want)
		}
		if got := f.state().String(); got != step.state {
			t.Errorf("%+v: stored %s, want %s", step.q, got, step.state)
		}
	}
	if got := f.messages(); len(got) != 3 { // two grants, and the hint of the head's re-check
		t.Errorf("published %q", got)
	}
}

// login gives the fixture a user with the rights, instead of the one who may do everything.
func (f *fixture) login(server *redistest.Server, rights ...string) {
	f.Helper()
	name := strings.ReplaceAll(f.channels, ":", "-")
	f.do(append([]string{"ACL", "SETUSER", name, "reset", "on", ">secret", "-@all", "~dsync:*", "+eval", "+evalsha"}, rights...)...)
	f.user = client(f.T, &redis.Options{Addr: server.Addr(), Username: name, Password: "secret"})
	f.Cleanup(func() { _, _ = send(f.rdb, "ACL", "DELUSER", name) })
}

// commands are the rights to all commands that scripts call, but one.
func commands(but string) []string {
	var rights []string
	for _, c := range scripts.Commands {
		if c != but {
			rights = append(rights, "+"+c)
		}
	}
	return rights
}

func TestTheACLLineIsEnough(t *testing.T) {
	server := redistest.Start(t)
	f := listening(t, server)
	f.login(server, append(commands(""), "&dsync:*")...)
	every(t, f, func(f *fixture, seed func(f *fixture), verb, want string) {
		if got := f.twice(seed, verbs[verb]); got != want {
			f.Errorf("\n got %s\nwant %s", got, want)
		}
	})
}

func TestRefusedChannelChangesNothingElse(t *testing.T) {
	server := redistest.Start(t)
	news := regexp.MustCompile(` \| (grant|hint|echo) \S+`)
	f := listening(t, server)
	f.login(server, append(commands(""), "resetchannels", "&elsewhere:*")...)
	every(t, f, func(f *fixture, seed func(f *fixture), verb, want string) {
		want, _, _ = strings.Cut(news.ReplaceAllString(want, ""), " -> ")
		got, _, _ := strings.Cut(f.twice(seed, verbs[verb]), " -> ")
		if got != want {
			f.Errorf("\n got %s\nwant %s", got, want)
		}
		if verb == "wait" {
			q := verbs[verb]
			q.nonce = "n0nce"
			if r := f.ask(q); strings.HasPrefix(r.String(), "queued") && r.last().flags != scripts.FlagMute {
				f.Errorf("%v: flags %d, want %d", r, r.last().flags, scripts.FlagMute)
			}
		}
	})
}

// TestMissingRight takes each command away in turn: whatever cannot be done says so, and no lock and no key stays that nobody owns.
func TestMissingRight(t *testing.T) {
	server := redistest.Start(t)
	for _, missing := range scripts.Commands {
		t.Run(strings.ReplaceAll(missing, "|", "-"), func(t *testing.T) {
			refused := false
			f := listening(t, server)
			f.login(server, append(commands(missing), "&dsync:*")...)
			every(t, f, func(f *fixture, seed func(f *fixture), verb, want string) {
				seed(f)
				q := verbs[verb]
				for range 2 {
					before := f.state()
					r := f.ask(q)
					after := f.state()
					if r.err != "" && !strings.HasPrefix(want, "error") {
						refused = true
						if !strings.Contains(r.err, "can't run this command") {
							f.Errorf("refused with %s", r.err)
						}
						if was, is := party(before.fields["h"]), party(after.fields["h"]); is != was && is != "" {
							f.Errorf("refused with %s, and %s holds", r.err, is)
						}
					}
					if after.native == -1 && before.native != -1 {
						f.Errorf("a key without expiry is left: %v", after.fields)
					}
				}
			})
			if granting := !slices.Contains([]string{"publish", "pubsub|numsub"}, missing); refused != granting {
				t.Errorf("anything refused: %v, want %v", refused, granting)
			}
		})
	}
}

// TestGrantWithoutTheRightToExpireIsTakenBack: with a key there already, what raises its expiry is asked for last.
func TestGrantWithoutTheRightToExpireIsTakenBack(t *testing.T) {
	server := redistest.Start(t)
	f := listening(t, server)
	f.ask(acquire(other, ""))
	f.ask(release(other, "", ""))
	before := f.state()
	f.login(server, append(commands("pexpireat"), "&dsync:*")...)
	q := acquire(me, "w")
	q.ttl = hour
	if r := f.ask(q); r.err == "" {
		t.Errorf("got %v", r)
	}
	after := f.state()
	if after.String() != "free" || after.native != before.native || after.fields["x"] != before.fields["x"] {
		t.Errorf("stored %v until %d, and before %v until %d", after.fields, after.native, before.fields, before.native)
	}
	f.user = f.rdb
	if r := f.ask(q); r.last().status != scripts.Granted { // the invariants want the key to outlive the lease
		t.Errorf("with the right: %v", r)
	}
}
