-- queue.lua: what every primitive's script begins with: names for KEYS and ARGV, the server's clock, the queue of
-- waiters, notes about generations that ended, messages. scripts.go puts it in front of mutex.lua and its sisters;
-- it never runs alone.
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

-- primary is a write that changes nothing. Each reply that would otherwise rest on reads alone comes after it, so that
-- a demoted primary or a replica answers READONLY and not from its old data.
local function primary() redis.call('HDEL', key, '') end

-- lifetime says until when the key must live for something that ends at `deadline`. Never shorter than it already
-- does: another's longer lease or place depends on it.
local function lifetime(deadline, lease) return math.max(expiry, deadline + math.max(RETENTION, lease)) end

-- outlive makes the key live so long. The key first and then x: x may say too little, but never more than is true.
local function outlive(deadline, lease)
  local wanted = lifetime(deadline, lease)
  if wanted > expiry then
    redis.call('PEXPIREAT', key, int(wanted))
    expiry = wanted
    redis.call('HSET', key, 'x', int(expiry))
  end
end

local function generation(token) return string.match(token, ':(.*)$') end
local function channel(token) return channels .. string.match(token, '^([^:]*)') end

-- tell publishes to a token's client. pcall: a refused PUBLISH changes nothing, the waiter's re-check finds the grant.
local function tell(token, text)
  local sent = redis.pcall('PUBLISH', channel(token), text)
  return type(sent) == 'number'
end

-- heard says how many subscribers this server sees on a token's channel, or nil if it may not say.
local function heard(token)
  local seen = redis.pcall('PUBSUB', 'NUMSUB', channel(token))
  return not seen.err and tonumber(seen[2]) or nil
end

local function echo()
  if nonce == '' then return end
  flags = flags + (tell(ask, 'e ' .. nonce .. ' ' .. int(heard(ask) or 0)) and ECHOED or MUTE)
end

-- note keeps a word about a token that has no place any more for RETENTION, and sweeps notes whose time is over: they end in
-- the order in which they were made. A note too far ahead proves that the clock was set back, and goes as well:
-- it would hold up the sweep until the clock is there again.
local function note(token, word)
  local got = redis.call('HMGET', key, 'u', 'v')
  local from, to = tonumber(got[1] or 1), tonumber(got[2] or 0) + 1
  for _ = 1, 4 do
    local old = from < to and redis.call('HGET', key, 'n' .. int(from))
    if not old then break end
    local deadline, its_word, its = string.match(old, '^(%d+) (%S+) (.*)$')
    deadline = tonumber(deadline)
    if deadline > now and deadline <= now + RETENTION then break end
    if redis.call('HGET', key, 'w' .. its) == its_word then redis.call('HDEL', key, 'w' .. its) end
    redis.call('HDEL', key, 'n' .. int(from))
    from = from + 1
  end
  redis.call('HSET', key, 'w' .. token, word,
    'n' .. int(to), int(now + RETENTION) .. ' ' .. word .. ' ' .. token,
    'u', int(from), 'v', int(to))
  if fresh then redis.call('HSET', key, 'f', int(fence)) end
  outlive(now, RETENTION)
end

-- numbered takes the number out of where a token stands, and the letter in front of it.
local function numbered(standing)
  local letter, number = string.match(standing or '', '^([pb]?)(%d+)$')
  return tonumber(number), letter
end

-- enqueue gives `ask` a place, or refreshes the one it has; it returns the number. The caller has seen to it that the key
-- outlives the place. One that was passed over gets its old number again and is not passed over twice: it is alive, and its
-- silence was this server's mistake. Others may be, if this very server sees their subscription now: what the echo
-- proved, it proved for the server that sent it, and that may be another node of the cluster, or a primary of the past.
local function enqueue(standing)
  local number, letter = numbered(standing)
  if not number then
    last = last + 1
    number = last
    redis.call('HSET', key, 'z', int(last))
  elseif letter == 'p' and number < first then
    first = number
    redis.call('HSET', key, 'a', int(first))
  end
  local back = letter == 'p' or letter == 'b'
  local passable = not back and said('p') and (heard(ask) or 0) > 0
  redis.call('HSET', key,
    'q' .. int(number), ask .. ' ' .. int(ttl) .. ' ' .. int(now + life) .. ' ' .. int(life) .. ' ' .. (passable and '1 ' or '0 ') .. meta,
    'w' .. ask, (back and 'b' or '') .. int(number))
  return number
end

-- leave takes `token` out of the queue, and says whether it was there.
local function leave(token, standing)
  local number = numbered(standing)
  if not number then return false end
  redis.call('HDEL', key, 'w' .. token, 'q' .. int(number)) -- its number is nobody else's, even if it was passed over
  return true
end

-- front returns the first live place: number, token, ttl, meta. It drops the holes and the dead in front of it, as many as the
-- budget allows. With `reachable` it also passes over a waiter whose subscription is gone, if that waiter once saw an
-- echo counted by this server: only then does a count of 0 mean that it is not listening here.
local function front(reachable)
  local from = first
  local number, token, lease, who
  while first <= last do
    if budget == 0 then unfinished = true break end
    budget = budget - 1
    local record = redis.call('HGET', key, 'q' .. int(first))
    if record then
      local its, length, deadline, lives, passable, by = string.match(record, '^(%S+) (%d+) (%d+) (%d+) (%d) (.*)$')
      if not its then foreign() end
      length, deadline, lives = tonumber(length), tonumber(deadline), tonumber(lives)
      if deadline > now + lives then -- the clock was set back; uncut, the place would live until it is there again
        deadline = now + lives
        redis.call('HSET', key, 'q' .. int(first),
          its .. ' ' .. int(length) .. ' ' .. int(deadline) .. ' ' .. int(lives) .. ' ' .. passable .. ' ' .. by)
      end
      if deadline <= now then
        redis.call('HDEL', key, 'q' .. int(first), 'w' .. its)
      elseif reachable and passable == '1' and heard(its) == 0 then
        redis.call('HDEL', key, 'q' .. int(first))
        note(its, 'p' .. int(first))
      else
        number, token, lease, who = first, its, length, by
        break
      end
    end
    first = first + 1
  end
  if first ~= from then redis.call('HSET', key, 'a', int(first)) end
  return number, token, lease, who
end

-- answer is the shape of every reply: status, fence, remaining ms, now us, whether others wait, position, flags.
local function answer(status, remaining, position)
  return { status, fence, remaining or 0, now_us or 0, first <= last and 1 or 0, position or 0,
    flags + (unfinished and AGAIN or 0) }
end
