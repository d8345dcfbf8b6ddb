-- A step of a hold: settles it, once; extends it; or withdraws an attempt to make it.
--
-- KEYS     see holds.lua
-- ARGV[1]  step: 1 settle, 2 extend, 3 withdraw (1) · tokens of a settle, µs of an extension (8) · time of the buckets'
--          answers, -1 for the store's own clock (8, signed) · name of the attempt (8) · of each bucket, the limit for
--          its answer: algorithm, 0 without one (1) · revision (8) · limit (4) · burst (4) · window in s (4)
--
-- Returns in one text: result (1) · end of the hold (8) · tokens refunded (8) · tokens charged (8) · after a settle,
-- also a repeated one, the state of each bucket as in decide.lua; reason 0 for a bucket that is not in the hold.
--
-- A bucket that was reset or lost since, or whose limit was lowered, gets no refund: its mark differs. Tokens beyond
-- the hold that overdraw a window under a lower limit also count in the next window.

local STEP = '<BI8i8c8'
local LIMIT = '<BI8I4I4I4'
local LIMIT_BYTES = 21
local REPLY = '<BI8I8I8'
local PAIR = '<I8I8'
local SETTLE, EXTEND, WITHDRAW = 1, 2, 3
local UNKNOWN, DONE, AS_BEFORE, SETTLED, ENDED = 0, 1, 2, 3, 4

local step, amount, told_us, attempt, first_limit = unpack(STEP, ARGV[1])
local slots = algorithm_of(CONCURRENCY)
local given_back, owed = 0, 0
local answers = {}

local function reply(stepped, end_us)
  return pack(REPLY, stepped, end_us, given_back, owed) .. table.concat(answers)
end

local record = record_of(value_at(KEYS[1]))
if not record then
  return reply(UNKNOWN, 0)
end

-- Charges `actual` tokens to a bucket instead of those held.
local function settle(place, key, holds, actual)
  local _, _, kind, held_limit, window_s, held_generation, held_mark, charged_us, spent, before =
    unpack(ENTRY, record.entries, place)
  holds = kind == CONCURRENCY and key or holds
  slots.free(slots.opened(holds, now_us), holds, number)
  if kind == CONCURRENCY then
    return
  end
  local algorithm, window_us = algorithm_of(kind), window_s * US_PER_S
  local value = value_at(key)
  local generation, revision, limit, burst, x, y, at_us, refunded, mark = stored(algorithm, value, window_us)
  if not generation then
    return
  end
  if actual < record.tokens and mark == held_mark and at_us and charged_us <= at_us then
    local given
    x, y, given = algorithm.refunded(
      x,
      y,
      at_us,
      limit,
      window_us,
      charged_us,
      record.tokens - actual,
      spent - (refunded - before)
    )
    refunded, given_back = refunded + given, given_back + given
  elseif actual > record.tokens and generation == held_generation then
    local more = actual - record.tokens
    local owing = limit < held_limit and limit or held_limit
    x, y, at_us = algorithm.charged(x, y, at_us, owing, window_us, pack(PAIR, charged_us, more), 1, 1)
    owed = owed + more
  end
  local new = written(algorithm, generation, revision, limit, burst, x, y, at_us, refunded, mark)
  if new ~= value then
    call('SET', key, new, 'EX', ttl_of(algorithm, window_us, limit, burst, at_us))
  end
end

local function settle_all(actual)
  for index = 2, #KEYS, 2 do
    local place = place_of(record, KEYS[index])
    if place and string.byte(record.entries, place + NUMBER_BYTES + #NO_BUCKET) > 0 then
      settle(place, KEYS[index], KEYS[index + 1], actual)
    end
  end
end

-- The current state of the bucket of KEYS[index], as an answer.
local function has_now(index)
  local key = KEYS[index]
  local place = place_of(record, key)
  if not place then
    return NO_BUCKET
  end
  local _, _, kind, held_limit, window_s = unpack(ENTRY, record.entries, place)
  local kind_now, revision, limit, burst, window_now_s =
    unpack(LIMIT, ARGV[1], first_limit + (index / 2 - 1) * LIMIT_BYTES)
  local is_in_force = kind_now == kind and window_now_s == window_s
  local remaining, reset_time, _
  if kind == CONCURRENCY then
    limit = is_in_force and limit or held_limit
    _, remaining, reset_time = slots.told(slots.opened(key, now_us), key, limit, now_us, 0)
  elseif kind > 0 then
    local algorithm, window_us = algorithm_of(kind), window_s * US_PER_S
    local value, its_limit, its_burst, x, y, at_us, is_corrupt = value_at(key)
    _, _, its_limit, its_burst, x, y, at_us, is_corrupt =
      opened(algorithm, value, -1, is_in_force and revision or -1, limit, burst, window_us)
    if value and not is_corrupt then
      _, _, _, _, remaining, reset_time =
        algorithm.judged(x, y, at_us, its_limit, window_us, time_of_check(told_us), ALL, its_burst)
    end
  end
  return remaining and pack(ANSWER, 1, WITHIN_LIMIT, remaining, 0, saturated(reset_time)) or NO_BUCKET
end

local function tell_all()
  for index = 2, #KEYS, 2 do
    answers[index / 2] = has_now(index)
  end
end

if step == WITHDRAW then
  local place = place_of_attempt(record, attempt)
  if not place then
    return reply(AS_BEFORE, record.end_us)
  end
  record.attempts = sub(record.attempts, 1, place - 1) .. sub(record.attempts, place + ATTEMPT_BYTES)
  if #record.attempts > 0 or record.is_settled then
    keep(record)
    return reply(AS_BEFORE, record.end_us)
  end
  settle_all(0)
  call('EXPIRE', KEYS[1], 0)
  return reply(DONE, record.end_us)
end

if record.is_settled then
  if step == SETTLE and record.actual == amount then
    tell_all()
    return reply(AS_BEFORE, record.end_us)
  end
  return reply(SETTLED, record.end_us)
end
if record.end_us <= now_us then
  return reply(ENDED, record.end_us)
end

if step == EXTEND then
  local end_us = now_us + amount < record.last_us and now_us + amount or record.last_us
  if end_us > record.end_us then -- equivalent: >= assigns the value it has
    record.end_us = end_us
  end
  for index = 2, #KEYS, 2 do
    local place = place_of(record, KEYS[index])
    local kind = place and string.byte(record.entries, place + NUMBER_BYTES + #NO_BUCKET) or 0
    if kind > 0 then
      local holds = kind == CONCURRENCY and KEYS[index] or KEYS[index + 1]
      slots.opened(holds, now_us) -- an ended slot is not taken again
      slots.extend(holds, number, record.end_us)
      -- Keeps the bucket for the settle: a hold may outlive a bucket that is full again.
      call('EXPIRE', KEYS[index], LEAST_TTL, 'GT')
    end
  end
  keep(record)
  return reply(DONE, record.end_us)
end

settle_all(amount)
tell_all()
record.is_settled, record.actual = true, amount
keep(record)
return reply(DONE, record.end_us)
