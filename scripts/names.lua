-- names.lua: what every primitive's script begins with: names for KEYS and ARGV, the server's clock, what is known of the
-- name, the shape of replies. Included where a script says so; it never runs alone.
--
-- KEYS[1]  hash of the name: everything that is known about it, in one key
--   h            the holder: "<token> <ttl> <deadline> <since, us> <meta>"
--   f            the last fence given, or reported as used; always there
--   x            when the key expires by itself (ms); only ever raised; always there
--   a, z         numbers of the first and the last place that may be taken in the queue
--   q<number>    a place: "<token> <ttl> <deadline> <life> <passable> <meta>"
--   w<token>     where a token stands: "<number>" in the queue; "p<number>" passed over, its number kept; "b<number>" back
--                in its place, not to be passed over again; "x" ended: a tombstone, whatever comes late for it does nothing
--   u, v, n<k>   the notes ("p" and "x" above) in the order of their end, "<deadline> <word> <token>", for the sweep
-- A token is "<client id>:<generation>". Deadlines are ms of this server's clock, lives and ttls are ms.
--
-- ARGV[1]  verb
-- ARGV[2]  token that renew and release speak of, else empty
-- ARGV[3]  token that asks (acquire, and release that asks again), else empty
-- ARGV[4]  ttl of the lease asked for or renewed, ms
-- ARGV[5]  life of a queue place from now, ms; the place is dropped if it is not asked for again by then
-- ARGV[6]  last fence used under the lease that release ends, 0 if none
-- ARGV[7]  letters: w wait in the queue; r this acquire repeats an earlier one of its token; p an echo proved the subscription
--          of the one who asks, so its absence means something (see enqueue); t leave a tombstone
-- ARGV[8]  prefix of channels; a client's channel is this and its client id
-- ARGV[9]  nonce to be echoed on the channel of the one who asks, empty for none
-- ARGV[10] who asks, for inspection, no spaces
--
-- Messages (the key comes last: it may hold any byte):
--   "g <generation> <fence> <remaining, ms> <now, us> <others wait: 0 or 1> <key>"  granted
--   "h <generation> <key>"                                                          somebody waits for your lease
--   "e <nonce> <subscribers seen by this server>"                                   the echo
local key = KEYS[1]
local verb, mine, ask = ARGV[1], ARGV[2], ARGV[3]
local ttl, life, used = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local letters, channels, nonce, meta = ARGV[7], ARGV[8], ARGV[9], ARGV[10]

local RETENTION = 60000 -- how long fence and notes outlive the last hold, ms; a longer ttl stretches it
local BUDGET = 64       -- numbers that one call may pass in the queue; more work is told by the flag AGAIN
local ECHOED, MUTE, AGAIN = 1, 2, 4

local flags, budget, unfinished = 0, BUDGET, false
local fresh                      -- there was no key when this call began: whatever is in it now is ours
local fence, expiry, first, last -- fields f, x, a, z
local now_us, now                -- the one TIME of this call

local function said(letter) return string.find(letters, letter, 1, true) ~= nil end
local function int(n) return string.format('%d', n) end -- tostring and .. round at 14 digits

local function tick()
  if now then return end
  local time = redis.call('TIME')
  now_us = tonumber(time[1]) * 1000000 + tonumber(time[2])
  now = math.floor(now_us / 1000)
end

local function foreign() error('WRONGTYPE the key holds a hash that is not of dsync', 0) end

-- open reads the fields that every verb needs, and where `token` stands. A hash without f or x is not ours, and is not touched.
local function open(token)
  local got = redis.call('HMGET', key, 'h', 'f', 'x', 'a', 'z', 'w' .. token)
  fence, expiry = tonumber(got[2] or 0), tonumber(got[3] or 0)
  first, last = tonumber(got[4] or 1), tonumber(got[5] or 0)
  local known = got[2] and got[3]
  if not (fence and expiry and first and last) or (not known and redis.call('HLEN', key) > 0) then foreign() end
  fresh = not known
  return got[1], got[6]
end

-- lifetime says until when the key must live for something that ends at `deadline`. Never shorter than it already
-- does: another's longer lease or place depends on it.
local function lifetime(deadline, lease) return math.max(expiry, deadline + math.max(RETENTION, lease)) end

-- answer is the shape of every reply: status, fence, remaining ms, now us, whether others wait, position, flags.
local function answer(status, remaining, position)
  return { status, fence, remaining or 0, now_us or 0, first <= last and 1 or 0, position or 0,
    flags + (unfinished and AGAIN or 0) }
end
