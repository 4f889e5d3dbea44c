// Package scripts holds the Lua that decides, inside Redis, who holds what. Each primitive has one script, named
// like its Go file; names.lua and queue.lua, which they include, are what they share.
//
// The package is not covered by the compatibility promise of dsync. The scripts' headers say what each verb expects
// and replies; the constants here name the same things for Go, and a test holds the two against each other.
package scripts

import (
	_ "embed"
	"strings"

	"github.com/e51fe0e6/dsync/driver"
)

//go:embed names.lua
var names string

//go:embed queue.lua
var queue string

//go:embed mutex.lua
var mutex string

// Mutex admits one holder at a time.
var Mutex = driver.NewScript(include(mutex))

// include puts the shared files where a script says that it includes them.
func include(script string) string {
	return strings.NewReplacer("-- include names.lua\n", names, "-- include queue.lua\n", queue).Replace(script)
}

// Commands are those that the scripts call: the ACL line of a user of dsync names them.
var Commands = []string{"time", "hmget", "hget", "hset", "hdel", "hlen", "pexpireat", "publish", "pubsub|numsub"}

// Verbs, the first argument of each script.
const (
	Acquire = "acquire"
	Renew   = "renew"
	Release = "release"
	Inspect = "inspect"
)

// Letters of the seventh argument.
const (
	Wait      = "w"
	Repeated  = "r"
	Passable  = "p"
	Tombstone = "t"
)

// Statuses, the first integer of each reply.
const (
	Failed    = -1
	NotYours  = 0
	Granted   = 1
	Queued    = 2
	Busy      = 3
	Ended     = 4
	Gone      = 5
	Again     = 6
	Renewed   = 7
	Released  = 8
	Withdrawn = 9
	Inspected = 10
)

// Flags, the seventh integer of each reply.
const (
	FlagEchoed = 1 // the echo was published
	FlagMute   = 2 // the echo was refused
	FlagAgain  = 4 // work is left for another call
)

// Group is the number of integers in the answer to one request; a release that asks again has two groups.
const Group = 7
