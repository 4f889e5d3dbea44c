-- queue.lua: the queue of waiters, notes about generations that ended, and messages; what they are made of is said in names.lua.
-- Included where a script says so; it never runs alone.

-- primary is a write that changes nothing. Each reply that would otherwise rest on reads alone comes after it, so that
-- a demoted primary or a replica answers READONLY and not from its old data.
local function primary() redis.call('HDEL', key, '') end

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
