-- mutex.lua: one holder at a time.
--
-- Guarantees: a token holds only between its grant and its deadline, which this server's clock decides; whoever ends a hold (release,
-- or anybody who meets an expired one) grants the next live waiter in the same call, writes it, and only then tells it.
-- Fences of a name strictly increase.
--
-- KEYS and ARGV, and the messages published: see names.lua.
--
-- Verbs (ARGV[1]) and the status (first integer) that each may reply:
--   acquire  1 granted: fence, its remaining time (a repeated acquire does not extend it)
--            2 queued: last fence, the holder's remaining time, my position (1 is next; an upper bound)
--            3 busy (not waiting): last fence, the holder's remaining time; no place is made
--            4 ended: a tombstone was found   5 gone: a repeated acquire found neither hold nor place
--            6 again: the budget was used up before it was decided; call again
--   renew    7 renewed: fence, remaining time    0 not yours
--   release  8 released   9 withdrawn: it was waiting    0 not yours
--            Release with ARGV[3] asks again in the same call: a second group of seven, as for acquire.
--   inspect  10: position is an upper bound of the places; then the holder's record or "", the number of places listed, at most 100 places' records in order
--   Each reply is status, fence, remaining ms, now us (0 if not read), others wait (never 0 if one does), position, flags
--   (1 echoed, 2 the echo was refused, 4 work is left: call again).
--   Any verb may reply -1 and the text of an error that a command in here raised: before anything was changed, unless
--   the user lacks the right to a later command only; even then it grants nothing, and no key stays without an expiry.
--
-- Twice or late: acquire by a token that holds or waits finds that, and says so; a generation that has ended while a command of
-- it was unanswered has a tombstone, so what arrives late does nothing; renew and release act only on the very
-- token they name, and no token is used for two holds.

-- include names.lua

local GRANTED, QUEUED, BUSY, ENDED, GONE, REPEAT = 1, 2, 3, 4, 5, 6
local RENEWED, RELEASED, WITHDRAWN, INSPECTED, NOT_YOURS = 7, 8, 9, 10, 0

local holder, deadline -- token and end of the live hold
local since, held_ttl, holder_meta

local function record()
  return holder .. ' ' .. int(held_ttl) .. ' ' .. int(deadline) .. ' ' .. int(since) .. ' ' .. holder_meta
end

-- hold writes a grant; the caller has taken the token out of the queue. The write that a full memory refuses comes first, so it tells
-- of an expiry that is not there yet: if that is refused, there is no hold.
local function hold(token, length, by)
  holder, held_ttl, deadline, since, holder_meta = token, length, now + length, now_us, by
  fence = math.max(fence + 1, now_us)
  local wanted = lifetime(deadline, length)
  redis.call('HSET', key, 'h', record(), 'f', int(fence), 'x', int(wanted))
  if wanted > expiry then
    local raised = redis.pcall('PEXPIREAT', key, int(wanted))
    if type(raised) ~= 'number' then
      redis.call('HSET', key, 'x', int(expiry))
      redis.call('HDEL', key, 'h')
      error(raised.err, 0)
    end
    expiry = wanted
  end
end

-- ended takes the hold of `mine` out, even if its deadline has passed: nobody was admitted since.
local function ended()
  redis.call('HDEL', key, 'h') -- first: a full memory refuses nothing after it
  if used > fence then
    fence = used
    redis.call('HSET', key, 'f', int(fence))
  end
end

local text, standing -- the holder's record, and where the token that the call is about stands

-- common is the common case: nobody waits, and the lock is free for who asks, or mine to release. It stands before the functions that
-- it does without, since to make those costs more than the case itself.
local function common()
  text, standing = open(verb == 'acquire' and ask or mine)
  if first <= last or standing then return end
  if verb == 'acquire' and not text and nonce == '' and not said('r') then
    tick()
    hold(ask, ttl, meta)
    return answer(GRANTED, ttl)
  end
  if verb == 'release' and ask == '' and text and string.sub(text, 1, #mine + 1) == mine .. ' '
    and not said('t') then
    ended()
    return answer(RELEASED)
  end
end

local function failed(why)
  if fresh then -- nothing stays without an expiry
    redis.pcall('HDEL', key, 'h', 'f', 'x', 'w' .. mine, 'u', 'v', 'n1')
  end
  return { -1, type(why) == 'table' and why.err or why }
end

local ok, reply = pcall(common)
if not ok then return failed(reply) end
if reply then return reply end

-- include queue.lua

-- read takes the holder's record in. An expired hold is dropped; it counts as one fence for each microsecond it may have lasted, since
-- local hand-overs in its process may have used as many.
local function read(text)
  if not text then return end
  local token, length, till, from, by = string.match(text, '^(%S+) (%d+) (%d+) (-?%d+) (.*)$')
  if not token then foreign() end
  holder, held_ttl, deadline, since, holder_meta = token, tonumber(length), tonumber(till), tonumber(from), by
  if deadline > now + held_ttl then -- the clock was set back
    -- since goes back at least as far: whatever fences the time until now was good for, it stays good for.
    since = since - (deadline * 1000 - now_us)
    deadline = now + held_ttl
    primary() -- a full memory refuses nothing after it
    redis.call('HSET', key, 'h', record())
  end
  if deadline <= now then
    fence = fence + math.max(0, deadline * 1000 - since)
    holder = nil
  end
end

-- grant hands a free lock to the first live waiter: written first, then told. A message about a grant that is not written would be
-- believed by a waiter even if the write were refused.
local function grant()
  local number, token, length, by = front(true)
  if not number then return end
  redis.call('HDEL', key, 'q' .. int(number), 'w' .. token)
  first = number + 1
  redis.call('HSET', key, 'a', int(first))
  hold(token, length, by)
  if token ~= ask then
    tell(token, 'g ' .. generation(token) .. ' ' .. int(fence) .. ' ' .. int(length) .. ' ' .. int(now_us) .. ' '
      .. (first <= last and '1' or '0') .. ' ' .. key)
  end
end

-- request is what acquire and a release that asks again share; `standing` says where ask stands.
local function request(standing)
  if holder == ask then primary() echo() return answer(GRANTED, deadline - now) end
  if standing == 'x' or said('r') and not standing then
    primary()
    if not holder then grant() end
    return answer(standing and ENDED or GONE)
  end
  if not holder and first > last and not standing then
    hold(ask, ttl, meta)
    echo()
    return answer(GRANTED, deadline - now)
  end
  if holder and not said('w') then primary() echo() return answer(BUSY, deadline - now) end

  if standing then
    primary() -- a full memory costs nobody the place that he has
  else
    redis.call('HSET', key, 'x', int(expiry)) -- may be refused for want of memory: then nothing else has been written
  end
  local was_held, number = holder, nil
  if said('w') then
    outlive(now + life, ttl)
    number = enqueue(standing)
  end
  if not holder then grant() end
  if not holder and not number and not unfinished then -- a try, and nobody alive is ahead
    leave(ask, standing)
    hold(ask, ttl, meta)
  end
  echo()
  if holder == ask then return answer(GRANTED, deadline - now) end
  if not holder then return answer(REPEAT) end -- the budget ended among the dead
  if not number then return answer(BUSY, deadline - now) end
  -- A hint goes to a holder that did not learn from its grant that somebody waits. The head repeats it with each re-check.
  if was_held and front(false) == number then tell(holder, 'h ' .. generation(holder) .. ' ' .. key) end
  return answer(QUEUED, deadline - now, math.max(1, number - first + 1))
end

local function acquire()
  tick()
  read(text)
  return request(standing)
end

local function renew()
  tick()
  read(text)
  if holder == mine then
    -- Never shorter than an earlier reply said: replies may arrive in any order.
    deadline, held_ttl = math.max(deadline, now + ttl), math.max(held_ttl, ttl)
    expiry = lifetime(deadline, held_ttl)
    redis.call('PEXPIREAT', key, int(expiry)) -- first: a full memory refuses nothing after it
    redis.call('HSET', key, 'h', record(), 'x', int(expiry))
    if first <= last then front(false) end
    return answer(RENEWED, deadline - now)
  end
  primary()
  if not holder and first <= last then grant() end
  return answer(NOT_YOURS)
end

local function release()
  local status = NOT_YOURS
  if first <= last or said('t') or ask ~= '' then tick() end
  if text and string.sub(text, 1, #mine + 1) == mine .. ' ' then
    ended()
    status = RELEASED
  else
    primary() -- first, for the same reason
    if leave(mine, standing) then status = WITHDRAWN end
    if now then read(text) end
  end
  if said('t') and standing ~= 'x' then note(mine, 'x') end
  if ask == '' then
    if now and not holder then grant() end
    return answer(status)
  end
  local reply = answer(status)
  for _, value in ipairs(request(redis.call('HGET', key, 'w' .. ask))) do reply[#reply + 1] = value end
  return reply
end

local function inspect()
  tick()
  local reply = answer(INSPECTED, 0, math.max(0, last - first + 1))
  reply[#reply + 1] = text or ''
  reply[#reply + 1] = 0
  for number = first, math.min(last, first + 999) do
    local place = reply[9] < 100 and redis.call('HGET', key, 'q' .. int(number))
    if place then
      reply[9] = reply[9] + 1
      reply[#reply + 1] = place
    end
  end
  return reply
end

local verbs = { acquire = acquire, renew = renew, release = release, inspect = inspect }
ok, reply = pcall(verbs[verb])
return ok and reply or failed(reply)
