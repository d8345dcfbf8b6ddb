-- Decides checks in the store, for CONSISTENCY=strict: `decide` of the algorithms, on shared buckets.
--
-- KEYS     the bucket of each check; checks of the same bucket are decided in order
-- ARGV[1]  of each: algorithm (1) · flags (1) · revision (8) · limit (4) · burst (4) · window in s (4) ·
--          cost (4) · time in µs, or -1 for the store's own clock (8, signed)
--
-- Flags: 1 peek · 2 joined with the next: all are charged, or none if one is denied · 4 its denial denies no other
--
-- Returns of each, in one text: allowed: 0 or 1 (1) · reason (1) · remaining (4) · retry_after (4) · reset_time (8).
-- An allowed part of a denied check reports its bucket without the charge. A peek writes nothing; a denial writes only
-- a newer limit, which other nodes may not have.
--
-- A malformed value yields reason 0 and, except for a peek, is replaced by a full bucket: the loss is reported once,
-- and the limit applies again.
--
-- A check takes no slots: only holds do.

local CHECK = '<BBI8I4I4I4I4i8'
local ANSWER = '<BBI4I4I8'
local NO_BUCKET = pack(ANSWER, 0, 0, 0, 0, 0)

local text, place = ARGV[1], 1
local algorithms = {}
local answers = {}
local parts, is_denied = {}, false -- of a check on several buckets

-- Writes the parts of an allowed check; of a denied one, only the changes that are not its charge.
local function conclude()
  for _, part in ipairs(parts) do
    local algorithm, window_us, limit, burst = part.algorithm, part.window_us, part.limit, part.burst
    local x, y, at_us = part.x, part.y, part.at_us
    if part.allowed and is_denied then
      local _, _, _, _, remaining, reset_time =
        algorithm.judged(x, y, at_us, limit, window_us, part.now_us, INT32_MAX + 1, burst)
      answers[part.index] = pack(ANSWER, 1, WITHIN_LIMIT, remaining, 0, saturated(reset_time))
    elseif part.allowed then
      x, y, at_us = part.x_after, part.y_after, part.after_us
    end
    if not part.is_peek and (part.is_written or (part.allowed and not is_denied)) then
      local value = written(algorithm, part.generation, part.revision, limit, burst, x, y, at_us, part.refunded, part.mark)
      call('SET', part.key, value, 'EX', ttl_of(algorithm, window_us, limit, burst, at_us))
    end
  end
  parts, is_denied = {}, false
end

for index = 1, #KEYS do
  local key = KEYS[index]
  local kind, flags, revision, limit, burst, window_s, cost, now_us
  kind, flags, revision, limit, burst, window_s, cost, now_us, place = unpack(CHECK, text, place)
  local algorithm, window_us = algorithms[kind], window_s * US_PER_S
  if not algorithm then
    algorithm = kind == CONCURRENCY and make_concurrency() or make_algorithm(kind)
    algorithms[kind] = algorithm
  end
  now_us = time_of_check(now_us)

  local generation, x, y, at_us, is_corrupt, is_edited, refunded, mark
  if kind == CONCURRENCY then
    x, is_corrupt = algorithm.opened(key, time_of_check(-1))
    y, flags = key, flags + (flags % 2 == 0 and 1 or 0)
  else
    generation, revision, limit, burst, x, y, at_us, is_corrupt, is_edited, refunded, mark =
      opened(algorithm, value_at(key), -1, revision, limit, burst, window_us)
  end
  local answer, allowed = NO_BUCKET, false
  local x_before, y_before, before_us = x, y, at_us
  if not is_corrupt then
    local remaining, reset_time, retry_after, reason
    allowed, x, y, at_us, remaining, reset_time, retry_after, reason =
      algorithm.judged(x, y, at_us, limit, window_us, now_us, cost, burst)
    answer = pack(ANSWER, allowed and 1 or 0, reason, remaining, retry_after, saturated(reset_time))
  end
  if flags > 1 or #parts > 0 then
    parts[#parts + 1] = {
      index = index,
      key = key,
      algorithm = algorithm,
      window_us = window_us,
      generation = generation,
      revision = revision,
      limit = limit,
      burst = burst,
      refunded = refunded,
      mark = mark,
      x = x_before,
      y = y_before,
      at_us = before_us,
      x_after = x,
      y_after = y,
      after_us = at_us,
      now_us = now_us,
      allowed = allowed,
      is_peek = flags % 2 == 1,
      is_written = is_corrupt or is_edited,
    }
    is_denied = is_denied or not (allowed or is_corrupt or flags >= 4)
  elseif (allowed or is_corrupt or is_edited) and flags == 0 then
    local value = written(algorithm, generation, revision, limit, burst, x, y, at_us, refunded, mark)
    call('SET', key, value, 'EX', ttl_of(algorithm, window_us, limit, burst, at_us))
  end
  answers[index] = answer
  if #parts > 0 and flags % 4 < 2 then
    conclude()
  end
end

return table.concat(answers)
