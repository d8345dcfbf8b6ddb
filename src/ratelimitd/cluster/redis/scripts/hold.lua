-- Makes a hold: charges a check to all its buckets, or to none, and stores a record; or answers from a stored one.
--
-- KEYS     see holds.lua
-- ARGV[1]  digest of the check (8) · name of the attempt (8) · lifetime in µs (8) · limit of holds per bucket (4) ·
--          longest lifetime in µs by limits of other calls, with extensions (8) · of each bucket, as in decide.lua:
--          algorithm (1) · flags (1) · revision (8) · limit (4) · burst (4) · window in s (4) · cost (4) · time in µs,
--          or -1 for the store's own clock (8, signed)
--
-- Flags: 4 its denial denies no other; it is charged if it passes itself.
--
-- Returns in one text: result (1) · end of the hold in µs, 0 if there is none (8) · number of malformed values (4) · of
-- each bucket, as in decide.lua: allowed, reason, remaining, retry_after, reset_time. An existing hold returns its
-- first answers; if another attempt made it, its buckets may differ, so the name of each (16) precedes its answer.
--
-- A hold that is not made reports passing buckets without the charge, and writes only newer limits.

local HEAD_OF_CALL = '<c8c8I8I4I8'
local CHECK = '<BBI8I4I4I4I4i8'
local REPLY = '<BI8I4'
local MADE, FOUND, DENIED, OF_ANOTHER_CHECK, FULL, OVER = 1, 2, 3, 4, 5, 6

local text = ARGV[1]
local digest, attempt, ttl_us, most, longest_us, place = unpack(HEAD_OF_CALL, text)
local answers, corrupt = {}, 0

local function reply(made, end_us)
  return pack(REPLY, made, end_us, corrupt) .. table.concat(answers)
end

local record = record_of(value_at(KEYS[1]))
if record then
  if record.digest ~= digest then
    return reply(OF_ANOTHER_CHECK, 0)
  end
  if record.is_settled or record.end_us <= now_us then
    return reply(OVER, 0)
  end
  -- A repeated call gets the answer of the first one.
  local found = record.attempts == attempt and MADE or FOUND
  if #record.attempts > 0 and not place_of_attempt(record, attempt) then
    -- Beyond MAX_ATTEMPTS none is recorded, so none can be withdrawn.
    record.attempts = #record.attempts < MAX_ATTEMPTS * ATTEMPT_BYTES and record.attempts .. attempt or ''
    keep(record)
  end
  local from = found == FOUND and 0 or NUMBER_BYTES
  for place_of_entry = 1, #record.entries, ENTRY_BYTES do
    answers[#answers + 1] =
      sub(record.entries, place_of_entry + from, place_of_entry + NUMBER_BYTES + #NO_BUCKET - 1)
  end
  return reply(found, record.end_us)
end

local parts, tokens = {}, 0
local is_denied, is_full, last_us = false, false, saturated(now_us + longest_us)
for index = 2, #KEYS, 2 do
  local part = { key = KEYS[index], holds = KEYS[index + 1] }
  local flags, window_s, at_us, allowed, remaining, reset_time, retry_after, reason
  part.kind, flags, part.revision, part.limit, part.burst, window_s, tokens, at_us, place = unpack(CHECK, text, place)
  part.algorithm, part.window_us = algorithm_of(part.kind), window_s * US_PER_S
  part.at_us = time_of_check(at_us)
  local is_corrupt, is_corrupt_too
  if part.kind == CONCURRENCY then
    part.holds = part.key
  else
    part.generation, part.revision, part.limit, part.burst, part.x, part.y, part.latest_us, is_corrupt, part.is_written, part.refunded, part.mark =
      opened(part.algorithm, value_at(part.key), -1, part.revision, part.limit, part.burst, part.window_us)
    part.is_written = part.is_written or is_corrupt
  end
  part.count, is_corrupt_too = algorithm_of(CONCURRENCY).opened(part.holds, now_us)
  if part.kind == CONCURRENCY then
    part.x, part.y = part.count, part.key
  end
  corrupt = corrupt + (is_corrupt and 1 or 0) + (is_corrupt_too and 1 or 0)
  allowed, part.x_after, part.y_after, part.after_us, remaining, reset_time, retry_after, reason =
    part.algorithm.judged(part.x, part.y, part.latest_us, part.limit, part.window_us, part.at_us, tokens, part.burst)
  part.answer = pack(ANSWER, allowed and 1 or 0, reason, remaining, retry_after, saturated(reset_time))
  part.allowed, part.window_s = allowed, window_s
  if not allowed then
    is_denied = is_denied or flags < 4
  else
    is_full = is_full or part.count >= most
    if part.kind == CONCURRENCY and now_us + part.window_us < last_us then
      last_us = now_us + part.window_us
    end
  end
  parts[index / 2] = part
end

local is_made = not (is_denied or is_full)
local end_us = now_us + ttl_us < last_us and now_us + ttl_us or last_us
local entries = {}

for index, part in ipairs(parts) do
  local algorithm, x, y, at_us, mark = part.algorithm, part.x, part.y, part.latest_us, part.mark
  local is_charged = part.allowed and is_made
  if is_charged then
    x, y, at_us = part.x_after, part.y_after, part.after_us
    local count = algorithm_of(CONCURRENCY).take(part.count, part.holds, number, end_us)
    if part.kind == CONCURRENCY then
      local _, remaining, reset_time, retry_after = algorithm.told(count, part.key, part.limit, now_us, 1)
      part.answer = pack(ANSWER, 1, WITHIN_LIMIT, remaining, retry_after, saturated(reset_time))
    else
      mark = mark > 0 and mark or now_us
    end
  elseif part.allowed then
    local _, _, _, _, remaining, reset_time =
      algorithm.judged(x, y, at_us, part.limit, part.window_us, part.at_us, ALL, part.burst)
    part.answer = pack(ANSWER, 1, WITHIN_LIMIT, remaining, 0, saturated(reset_time))
  end
  if part.kind ~= CONCURRENCY and (is_charged or part.is_written) then
    local value = written(algorithm, part.generation, part.revision, part.limit, part.burst, x, y, at_us, part.refunded, mark)
    call('SET', part.key, value, 'EX', ttl_of(algorithm, part.window_us, part.limit, part.burst, at_us))
  end
  answers[index] = part.answer
  entries[index] = pack(
    ENTRY,
    sub(part.key, -NUMBER_BYTES),
    part.answer,
    is_charged and part.kind or 0,
    part.limit,
    part.window_s,
    part.generation or 0,
    mark or 0,
    at_us or 0,
    part.kind == TOKEN_BUCKET and x or 0,
    part.refunded or 0
  )
end

if not is_made then
  return reply(is_denied and DENIED or FULL, 0)
end
keep({
  digest = digest,
  end_us = end_us,
  last_us = last_us,
  actual = 0,
  tokens = tokens,
  attempts = attempt,
  entries = table.concat(entries),
})
return reply(MADE, end_us)
