-- Decides one check of each of several buckets unknown to a node, and returns their new states.
--
-- KEYS     the buckets
-- ARGV[1]  of each: algorithm (1) · peek: 0 or 1 (1) · revision (8) · limit (4) · burst (4) · window in s (4) ·
--          cost (4) · time in µs, or -1 for the store's own clock (8, signed)
--
-- Returns { number of malformed values,
--           of each: allowed: 0 or 1 (1) · reason (1) · remaining (4) · retry_after (4) · reset_time (8) · the new
--           value, or the default of a missing one … }
--
-- A peek writes nothing; a denial writes only a newer limit, which other nodes may not have. The call is not numbered:
-- a node sends it once, and a check whose reply is lost may have been charged. A malformed value is replaced by a full
-- bucket.

local CHECK = '<BBI8I4I4I4I4i8'
local ANSWER = '<BBI4I4I8'

local text, place = ARGV[1], 1
local algorithms = {}
local reply, corrupt = {}, 0

for index = 1, #KEYS do
  local key = KEYS[index]
  local kind, peek, revision, limit, burst, window_s, cost, now_us
  kind, peek, revision, limit, burst, window_s, cost, now_us, place = unpack(CHECK, text, place)
  now_us = time_of_check(now_us)
  local algorithm, window_us = algorithms[kind], window_s * US_PER_S
  if not algorithm then
    algorithm = make_algorithm(kind)
    algorithms[kind] = algorithm
  end

  local value = value_at(key)
  local generation, x, y, at_us, is_corrupt, is_edited, refunded, mark
  generation, revision, limit, burst, x, y, at_us, is_corrupt, is_edited, refunded, mark =
    opened(algorithm, value, -1, revision, limit, burst, window_us)
  if is_corrupt then
    corrupt = corrupt + 1
  end
  local allowed, x_after, y_after, after_us, remaining, reset_time, retry_after, reason =
    algorithm.judged(x, y, at_us, limit, window_us, now_us, cost, burst)
  if allowed and peek == 0 then
    x, y, at_us = x_after, y_after, after_us
  end
  local is_stored = peek == 0 and (allowed or is_corrupt or is_edited)
  if is_stored or is_corrupt or not value then
    value = written(algorithm, generation, revision, limit, burst, x, y, at_us, refunded, mark)
  end
  if is_stored then
    call('SET', key, value, 'EX', ttl_of(algorithm, window_us, limit, burst, at_us))
  end
  local answer = pack(ANSWER, allowed and 1 or 0, reason, remaining, retry_after, saturated(reset_time))
  reply[index + 1] = answer .. value
end

reply[1] = corrupt
return reply
