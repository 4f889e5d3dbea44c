// Package sim runs the whole system in virtual time: several simulated processes with the public API of package dsync, both
// real client libraries under their adapters, and the real Lua on an in-memory server, in one [testing/synctest] bubble. It is test code.
//
// # Parts
//
//   - A [World] is a server and the processes that use it. Its trace tells what happened when.
//   - A [Process] is a client with a [Clock], a driver and a [Link] of its own. Its clock pauses it, and goes faster or slower; its link
//     fails in all the ways of networks. What the process's goroutines do, they do between two calls of [Clock.Gate].
//   - A [History] is what the users of the locks saw, and only that. Its checks know nothing of the library.
//   - A plan, made from a seed, says who does what and what goes wrong when. What each kind of fault is allowed to break is said in one
//     place, excuses.
//
// # What makes a seed replay
//
// Every segment on the network takes a random time of its own, so that no two things happen at once in virtual time unless one is the cause of the
// other; all dice come from the seed, one stream for each worker, connection and process. What is left to the Go scheduler
// is the order of goroutines that one event wakes together.
//
// # Traps
//
// Virtual time stands still while any goroutine of the bubble waits for a sync.Mutex, so whoever holds one must not wait for
// virtual time: that would hang for ever. The client libraries keep to this but for one place, see the driver of a [Process].
// miniredis publishes under its only lock, and a subscriber that does not read would stop it: a [Conn] always reads from the server,
// whatever its client does.
package sim
