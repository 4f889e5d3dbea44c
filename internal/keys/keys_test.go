package keys

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// tag is what Redis Cluster hashes of a key: what stands between the first "{" and the next "}", unless that is empty.
func tag(key string) string {
	_, rest, ok := strings.Cut(key, "{")
	if !ok {
		return key
	}
	inside, _, ok := strings.Cut(rest, "}")
	if !ok || inside == "" {
		return key
	}
	return inside
}

// B120: whatever the name, its keys share a slot, and no other name has them.
func TestKeysOfANameShareASlotAndAreItsOwn(t *testing.T) {
	names := []string{
		"a", "{a}", "a{b}c{d}", "{}a", "a{}", "{a", "a}", "}{", "{{a}}", "{a}{b}", "}", `\`, `\}`, `\\`, `}\`, "a}:mutex", "\x00", "\xff", " ", "a b", "é", "e\u0301",
	}
	seen := map[string]string{}
	for _, name := range names {
		mutex, other := For("p", name, "mutex"), For("p", name, "semaphore")
		require.Equal(t, tag(mutex), tag(other), "%q", name)
		require.NotEqual(t, mutex, tag(mutex), "%q has no hash tag", name)
		for _, key := range []string{mutex, other} {
			require.NotContains(t, seen, key, "%q and %q", name, seen[key])
			seen[key] = name
		}
		back, kind := Split("p", mutex)
		require.Equal(t, name, back)
		require.Equal(t, "mutex", kind)
	}
}

func FuzzKeys(f *testing.F) {
	f.Add("a", "}a")
	f.Add(`\}`, "}")
	f.Add("a}:mutex", "a")
	f.Fuzz(func(t *testing.T, a, b string) {
		if Check(a) != nil || Check(b) != nil {
			return
		}
		for _, name := range []string{a, b} {
			one, two := For("p", name, "mutex"), For("p", name, "once")
			if tag(one) != tag(two) || tag(one) == one {
				t.Fatalf("the keys of %q fall apart: %q %q", name, one, two)
			}
			if back, kind := Split("p", one); back != name || kind != "mutex" {
				t.Fatalf("%q came back as %q, %q", name, back, kind)
			}
		}
		if a != b && For("p", a, "mutex") == For("p", b, "mutex") {
			t.Fatalf("%q and %q share a key", a, b)
		}
	})
}

func TestNamesAndPrefixesThatCannotBe(t *testing.T) {
	require.NoError(t, Check("x"))
	require.NoError(t, Check(strings.Repeat("x", MaxName)))
	require.ErrorContains(t, Check(""), "empty")
	long := Check(strings.Repeat("x", 1<<20))
	require.ErrorContains(t, long, "1048576 bytes, want 1 to 1024")
	require.Less(t, len(long.Error()), 200)
	require.NoError(t, CheckPrefix("app:locks"))
	for _, bad := range []string{"", "a{", "}", strings.Repeat("x", MaxName+1)} {
		require.Error(t, CheckPrefix(bad))
	}
}
