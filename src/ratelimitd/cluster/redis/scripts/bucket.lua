-- Common to all scripts: the stored form of a bucket, and exact arithmetic. The algorithms follow, one file each, then
-- the script itself. Python joins the files (../codec.py), because the server has no `require`.
--
-- A value is this head and the algorithm's fields; a full bucket is the head alone:
--
--     format (1 byte) · algorithm (1) · generation (4) · revision (8) · limit (4)          little-endian, unsigned
--
-- The fields are numbers of 8 bytes. A token bucket whose limit has a burst ends with the burst (4 bytes). A bucket
-- with refunds has another format: the number of refunded tokens (8) follows the head. One charged for a hold has a
-- third format: a mark (8) follows that number, the store's time in µs of its first hold. The mark is unique among the
-- buckets of a name; an edit that lowers the limit or forgives tokens clears it.
--
-- An algorithm is a table of functions. The state of a bucket is three values `x, y, at_us` that only its algorithm
-- interprets; `at_us` is the latest time, nil for a full bucket. A table per state would cost more than a charge. Every
-- number is an integer below 2^53, where doubles are exact.
--
-- Globals are forbidden, so code outside functions runs in every call of a script: a function creates an algorithm when
-- it is first needed.

local call, pcall = redis.call, redis.pcall
local pack, unpack = struct.pack, struct.unpack
local floor, ceil = math.floor, math.ceil
local sub = string.sub

local FORMAT, FORMAT_OF_REFUNDED, FORMAT_OF_HELD = 1, 2, 3
local HEAD = '<BBI4I8I4'
local HEAD_BYTES = 18
local BURST = '<I4'
local BURST_BYTES = 4

local US_PER_S = 1000000
local INT32_MAX = 2147483647
-- equivalent: 2^53 + 1 is no double, and is read as 2^53
local EXACT = 9007199254740992 -- 2^53: below it every integer is a double
local LARGEST = EXACT - 1
local LEAST_TTL_S, LEAST_TTL = 3600, '3600'
local LEAST_CALENDAR_US = 1073741824 * US_PER_S -- 2^30 s
local LONGEST_CALENDAR_S = 32 * 86400

local WITHIN_LIMIT, LIMIT_EXCEEDED, COST_EXCEEDS_LIMIT = 1, 2, 3

-- Whether a reply is an error because the key has a value of another type.
local function is_of_another_type(reply)
  return type(reply) == 'table' and reply.err and sub(reply.err, 1, 9) == 'WRONGTYPE'
end

-- The value of a key; an error reply, which is no bucket either, if it has another type. Any other error, such as a
-- missing permission, ends the script: otherwise every bucket would seem missing and be made full.
local function value_at(key)
  local value = pcall('GET', key)
  if type(value) == 'table' and not is_of_another_type(value) then
    return call('GET', key)
  end
  return value
end

-- The time of a check, in µs; a negative one stands for the store's clock, read once per call.
local store_us
local function time_of_check(now_us)
  if now_us < 0 then
    if not store_us then
      local now = call('TIME')
      store_us = now[1] * US_PER_S + now[2]
    end
    return store_us
  end
  return now_us
end

-- A sum of tokens, capped where it would be inexact; a bucket that far overdrawn may lose tokens.
local function saturated(sum)
  if sum > LARGEST then
    return LARGEST
  end
  return sum
end

-- The seconds of a + b µs, rounded up; the sum may pass 2^53.
local function seconds(a_us, b_us)
  local sum_us = a_us + b_us
  if sum_us < EXACT then
    return ceil(sum_us / US_PER_S)
  end
  local a_rest, b_rest = a_us % US_PER_S, b_us % US_PER_S
  return (a_us - a_rest) / US_PER_S + (b_us - b_rest) / US_PER_S + ceil((a_rest + b_rest) / US_PER_S)
end

-- A delay in seconds as answers hold it.
local function delay(seconds_left)
  if seconds_left > INT32_MAX then -- equivalent: at the bound both are the bound
    return INT32_MAX
  end
  return seconds_left
end

-- The tokens of a full bucket; a burst of 0 is none.
local function capacity_of(limit, burst)
  return burst > 0 and burst or limit
end

-- How long the server keeps a bucket, in seconds: well after it is full again. A fixed window of 34 years or more is a
-- calendar window (../../../algorithms/calendar_window.py), kept until its end, which is unknown while it is full.
-- Nodes send no burst that takes longer than INT32_MAX to fill; foreign values must not yield a time that the server
-- refuses.
local function ttl_of(algorithm, window_us, limit, burst, at_us)
  if algorithm.has_calendars and window_us >= LEAST_CALENDAR_US then
    local left_s = at_us and ceil((window_us - at_us % window_us) / US_PER_S) or LONGEST_CALENDAR_S
    return left_s + LEAST_TTL_S
  end
  local ttl_s = 2 * window_us / US_PER_S
  if burst > 0 then
    ttl_s = 2 * delay(ceil(window_us / US_PER_S * burst / limit))
  end
  if ttl_s < LEAST_TTL_S then
    return LEAST_TTL -- as text: formatting a number takes 0.5 µs
  end
  return ttl_s
end
