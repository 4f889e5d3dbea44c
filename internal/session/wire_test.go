package session

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/e51fe0e6/dsync/driver"
	"github.com/e51fe0e6/dsync/internal/claim"
	"github.com/e51fe0e6/dsync/scripts"
)

func reply(t *testing.T, elems ...any) driver.Reply {
	t.Helper()
	for i, e := range elems {
		if n, ok := e.(int); ok {
			elems[i] = int64(n)
		}
	}
	r, err := driver.NewReply(elems)
	require.NoError(t, err)
	return r
}

func TestDecodeTakesBothGroupsOfACombinedRelease(t *testing.T) {
	cmd := &claim.Command{Verb: claim.Release, End: "old", Ask: "new"}
	rep, flags := decode(cmd, reply(t,
		scripts.Released, 7, 0, 1_000_000, 0, 0, 0,
		scripts.Queued, 9, 250, 1_000_000, 1, 2, scripts.FlagEchoed|scripts.FlagAgain), nil)
	require.Equal(t, claim.Answered, rep.Class)
	require.Equal(t, claim.Answer{Status: claim.Released, Fence: 7, ServerTime: time.Second}, rep.End)
	require.Equal(t, claim.Answer{
		Status: claim.Queued, Fence: 9, Remaining: 250 * time.Millisecond, ServerTime: time.Second, Waiting: true, Position: 2, Unfinished: true,
	}, rep.Ask)
	require.Equal(t, int64(scripts.FlagEchoed|scripts.FlagAgain), flags)
}

func TestDecodeOfNonsenseIsUnknown(t *testing.T) {
	cmd := &claim.Command{Verb: claim.Acquire, Ask: "new"}
	for what, r := range map[string]driver.Reply{
		"empty":           {},
		"short":           reply(t, 1, 2, 3),
		"long":            reply(t, 1, 2, 3, 4, 5, 6, 7, 8),
		"text":            reply(t, 1, 2, "x", 4, 5, 6, 7),
		"negative":        reply(t, 1, -2, 3, 4, 5, 6, 7),
		"unknown status":  reply(t, 99, 2, 3, 4, 5, 6, 7),
		"too large":       reply(t, 1, int64(1)<<53, 3, 4, 5, 6, 7),
		"endless lease":   reply(t, 1, 2, int64(1)<<52, 4, 5, 6, 7),
		"failed, no text": reply(t, 2),
	} {
		rep, _ := decode(cmd, r, nil)
		require.Equal(t, claim.Unknown, rep.Class, what)
		require.Error(t, rep.Err, what)
	}
}

func TestDecodeClassifiesErrors(t *testing.T) {
	cmd := &claim.Command{Verb: claim.Acquire, Ask: "new"}
	for text, want := range map[string]claim.Class{
		"OOM command not allowed when used memory > 'maxmemory'.":                           claim.Refused,
		"READONLY You can't write against a read only replica.":                             claim.Refused,
		"@user_script:12: @user_script: 12: -MISCONF Redis is configured to save":           claim.Refused,
		"WRONGTYPE Operation against a key holding the wrong kind of value":                 claim.Denied,
		"ERR Error compiling script (new function): :1: WRONGTYPE Operation":                claim.Denied,
		"ERR The user executing the script can't run this command or subcommand script: 1,": claim.Denied,
		"NOPERM this user has no permissions":                                               claim.Denied,
		"TRYAGAIN Multiple keys request during rehashing of slot":                           claim.NotExecuted,
		"a text without any code":                                                           claim.Refused,
		"user_script:47: attempt to perform arithmetic on a nil value":                      claim.Refused,
		"Unknown Redis command called from script script: 4d35b0, on @user_script:1.":       claim.Denied,
	} {
		rep, _ := decode(cmd, reply(t, scripts.Failed, text), nil)
		require.Equal(t, want, rep.Class, text)
		require.ErrorContains(t, rep.Err, text)
	}
	for err, want := range map[error]claim.Class{
		&driver.Error{Class: driver.ErrNotExecuted, Cause: errors.New("dial")}: claim.NotExecuted,
		&driver.Error{Class: driver.ErrUnknown, Cause: errors.New("EOF")}:      claim.Unknown,
		&driver.Error{Class: driver.ErrPermanent, Cause: errors.New("NOAUTH")}: claim.Denied,
		errors.New("of no class"): claim.Unknown,
	} {
		rep, _ := decode(cmd, driver.Reply{}, err)
		require.Equal(t, want, rep.Class, err)
	}
}

func TestParseTakesTheScriptsMessagesOnly(t *testing.T) {
	m, ok := parse("g Gen 17 250 1000000 1 dsync:{a b}:mutex")
	require.True(t, ok)
	require.Equal(t, message{
		kind: 'g', generation: "Gen", fence: 17, remaining: 250 * time.Millisecond, serverTime: time.Second, waiting: true, key: "dsync:{a b}:mutex",
	}, m)
	m, ok = parse("h Gen dsync:{a}:mutex")
	require.True(t, ok)
	require.Equal(t, message{kind: 'h', generation: "Gen", key: "dsync:{a}:mutex"}, m)
	m, ok = parse("e nonce 3")
	require.True(t, ok)
	require.Equal(t, message{kind: 'e', nonce: "nonce", count: 3}, m)
	for _, bad := range []string{
		"", "g", "g ", "x a b", "h Gen", "e nonce", "e nonce -1", "e nonce 1e3", "e nonce 03", "g Gen 17 250 1 2 key", "g Gen 17 250 1 1",
		"g Gen -1 250 1 1 key", "g Gen 9007199254740992 250 1 1 key", "g Gen 1 9007199254740991 1 1 key", "gg Gen 1 1 1 1 key",
	} {
		_, ok := parse(bad)
		require.False(t, ok, "%q", bad)
	}
}

// What somebody publishes on the channel may be anything: it is parsed without a panic, and never to figures that overflow.
func FuzzParse(f *testing.F) {
	f.Add("g Gen 17 250 1000000 1 key")
	f.Add("h Gen key")
	f.Add("e nonce 3")
	f.Fuzz(func(t *testing.T, payload string) {
		m, ok := parse(payload)
		if !ok {
			return
		}
		if m.remaining < 0 || m.serverTime < 0 || m.fence < 0 || m.count < 0 || !strings.HasSuffix(payload, m.key) {
			t.Fatalf("%q became %+v", payload, m)
		}
	})
}

func FuzzDecode(f *testing.F) {
	f.Add(int64(1), int64(2), int64(3), int64(4), int64(1), int64(0), int64(0), "text", 7)
	f.Fuzz(func(t *testing.T, a, b, c, d, e, g, h int64, text string, n int) {
		elems := []any{a, b, c, d, e, g, h, text, a, b, c, d, e, g, h}
		r, err := driver.NewReply(elems[:max(0, min(n, len(elems)))])
		if err != nil {
			t.Fatal(err)
		}
		for _, cmd := range []*claim.Command{
			{Verb: claim.Acquire, Ask: "x"}, {Verb: claim.Renew, End: "x"}, {Verb: claim.Release, End: "x", Ask: "y"},
		} {
			rep, _ := decode(cmd, r, nil)
			for _, got := range []claim.Answer{rep.End, rep.Ask} {
				if got.Remaining < 0 || got.ServerTime < 0 || got.Fence < 0 {
					t.Fatalf("%v became %+v", elems, rep)
				}
			}
		}
	})
}
