// Package keys builds the keys and channels of dsync. It is the only place that does.
package keys

import (
	"errors"
	"fmt"
	"strings"
)

// MaxName is the longest name in bytes.
const MaxName = 1024

// Check says what is wrong with a name, or nil. The error repeats at most the beginning of the name.
func Check(name string) error {
	switch {
	case name == "":
		return fmt.Errorf("the name is empty, want 1 to %d bytes", MaxName)
	case len(name) > MaxName:
		return fmt.Errorf("the name %q has %d bytes, want 1 to %d", Short(name), len(name), MaxName)
	}
	return nil
}

// CheckPrefix says what is wrong with a prefix, or nil. A brace in it would open the hash tag before the name does, and the keys
// of a name could fall apart over a cluster.
func CheckPrefix(prefix string) error {
	switch {
	case prefix == "":
		return errors.New("the prefix is empty")
	case len(prefix) > MaxName:
		return fmt.Errorf("the prefix has %d bytes, want at most %d", len(prefix), MaxName)
	case strings.ContainsAny(prefix, "{}"):
		return fmt.Errorf("the prefix %q has a brace", Short(prefix))
	}
	return nil
}

// For returns the key of a name: <prefix>:{<name>}:<kind>. The braces make all keys of a name share a cluster slot.
//
// An empty hash tag is no tag, so a name that begins with "}" would hash the whole key, kind included; it gets a backslash in front, and
// so does a name that begins with a backslash, lest the two meet.
func For(prefix, name, kind string) string {
	escape := ""
	if name != "" && (name[0] == '}' || name[0] == '\\') {
		escape = `\`
	}
	return prefix + ":{" + escape + name + "}:" + kind
}

// Channels returns the prefix of all channels; a client's channel is it and the client's id.
func Channels(prefix string) string { return prefix + ":c:" }

// Short returns the name, or its beginning if it is long, for errors and logs.
func Short(name string) string {
	const most = 64
	if len(name) <= most {
		return name
	}
	return name[:most] + "…"
}

// Split returns the name and the kind of a key that For made with this prefix.
func Split(prefix, key string) (name, kind string) {
	key = strings.TrimPrefix(key, prefix+":{")
	if i := strings.LastIndex(key, "}:"); i >= 0 {
		key, kind = key[:i], key[i+len("}:"):]
	}
	return strings.TrimPrefix(key, `\`), kind
}
