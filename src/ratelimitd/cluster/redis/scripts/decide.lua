-- Decides checks in the store, for CONSISTENCY=strict: `decide` of the algorithms, on the buckets that all share.
--
-- KEYS     the bucket of each check; one that is there twice is charged by the first check before the second is judged
-- ARGV[1]  of each: algorithm (1) · peek: 0 or 1 (1) · revision (8) · limit (4) · burst (4) · window in s (4) ·
--          cost (4) · time in µs, or -1 for the store's own clock (8, signed)
--
-- Returns of each, in one text: allowed: 0 or 1 (1) · reason (1) · remaining (4) · retry_after (4) · reset_time (8).
-- A peek writes nothing, and a denial nothing but a newer limit, of which others may not have heard.
--
-- Of a value that is no bucket the reason is 0, and it is replaced by a bucket that begins anew, unless it was a peek:
-- that says once that something was lost, and does not leave the caller without a limit.

local CHECK = '<BBI8I4I4I4I4i8'
local ANSWER = '<BBI4I4I8'
local NO_BUCKET = pack(ANSWER, 0, 0, 0, 0, 0)

local text, place = ARGV[1], 1
local algorithms = {}
local answers = {}

for index = 1, #KEYS do
  local key = KEYS[index]
  local kind, peek, revision, limit, burst, window_s, cost, now_us
  kind, peek, revision, limit, burst, window_s, cost, now_us, place = unpack(CHECK, text, place)
  local algorithm, window_us = algorithms[kind], window_s * US_PER_S
  if not algorithm then
    algorithm = make_algorithm(kind)
    algorithms[kind] = algorithm
  end
  now_us = time_of_check(now_us)

  local generation, x, y, at_us, is_corrupt, is_edited, refunded
  generation, revision, limit, burst, x, y, at_us, is_corrupt, is_edited, refunded =
    opened(algorithm, value_at(key), -1, revision, limit, burst, window_us)
  local answer, allowed = NO_BUCKET, false
  if not is_corrupt then
    local remaining, reset_time, retry_after, reason
    allowed, x, y, at_us, remaining, reset_time, retry_after, reason =
      algorithm.judged(x, y, at_us, limit, window_us, now_us, cost, burst)
    answer = pack(ANSWER, allowed and 1 or 0, reason, remaining, retry_after, saturated(reset_time))
  end
  if (allowed or is_corrupt or is_edited) and peek == 0 then
    local value = written(algorithm, generation, revision, limit, burst, x, y, at_us, refunded)
    call('SET', key, value, 'EX', ttl_of(algorithm, window_us, limit, burst, at_us))
  end
  answers[index] = answer
end

return table.concat(answers)
