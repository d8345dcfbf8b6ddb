-- Decides one check in the store, for CONSISTENCY=strict: `decide` of the algorithms, on the bucket that all share.
--
-- KEYS[1]  the bucket
-- ARGV[1]  algorithm (1) · peek: 0 or 1 (1) · revision (8) · limit (4) · window in s (4) · cost (4) ·
--          time in µs, or -1 for the store's own clock (8, signed)
--
-- Returns allowed: 0 or 1 (1) · reason (1) · remaining (4) · retry_after (4) · reset_time (8) · time in µs (8).
-- A peek writes nothing, and a denial nothing but a newer limit, of which others may not have heard.
--
-- A value that is no bucket is answered with the error CORRUPT, and replaced by a bucket that begins anew, unless it was
-- a peek: the error says once that something was lost, and does not keep the caller unlimited for ever.

local CHECK = '<BBI8I4I4I4i8'
local OUTCOME = '<BBI4I4I8I8'

local kind, peek, revision, limit, window_s, cost, now_us = unpack(CHECK, ARGV[1])
local algorithm, window_us = make_algorithm(kind), window_s * US_PER_S
if now_us < 0 then
  local now = call('TIME')
  now_us = now[1] * US_PER_S + now[2]
end

local generation, x, y, at_us, is_corrupt, is_edited
generation, revision, limit, x, y, at_us, is_corrupt, is_edited =
  opened(algorithm, value_at(KEYS[1]), -1, revision, limit, window_us)

local allowed, remaining, reset_time, retry_after, reason
if not is_corrupt then
  allowed, x, y, at_us, remaining, reset_time, retry_after, reason =
    algorithm.judged(x, y, at_us, limit, window_us, now_us, cost)
end
if (allowed or is_corrupt or is_edited) and peek == 0 then
  local value = written(algorithm, generation, revision, limit, x, y, at_us)
  call('SET', KEYS[1], value, 'EX', ttl_of(window_us))
end
if is_corrupt then
  return redis.error_reply('CORRUPT the value of a bucket is none')
end
return pack(OUTCOME, allowed and 1 or 0, reason, remaining, retry_after, saturated(reset_time), now_us)
