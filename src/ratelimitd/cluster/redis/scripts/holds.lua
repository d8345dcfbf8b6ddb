-- Common to the scripts of holds: the record of a hold on the buckets of one call.
--
--     format (1) · whether it is settled (1) · digest of the check (8) · end in µs (8) · latest end (8) ·
--     tokens it was settled with (4) · tokens held (4) · attempts (1) · the name of each (8) ·
--     of each bucket: its name (16) · its answer (18) · algorithm, 0 if it was not charged (1) · limit (4) ·
--         window in s (4) · generation (4) · mark (8) · time charged (8) · tokens missing then (8) ·
--         tokens refunded until then (8)
--
-- It is kept for GRACE_S after its end. KEYS: the record, then the key of each bucket and that of its open holds, which
-- are the same for a concurrency bucket.

local RECORD = '<BBc8I8I8I4I4B'
local RECORD_BYTES = 35
local ATTEMPT_BYTES, MAX_ATTEMPTS = 8, 8
local ENTRY = '<c16c18BI4I4I4I8I8I8I8'
local ENTRY_BYTES = 79
local NUMBER_BYTES = 16
local GRACE_S = 60

local ANSWER = '<BBI4I4I8'
local NO_BUCKET = pack(ANSWER, 0, 0, 0, 0, 0)
local ALL = INT32_MAX + 1 -- a cost that every bucket denies; the denial contains what it has

local number = sub(KEYS[1], -NUMBER_BYTES)
local now_us = time_of_check(-1)
local algorithms = {}

local function algorithm_of(kind)
  local algorithm = algorithms[kind]
  if not algorithm then
    algorithm = kind == CONCURRENCY and make_concurrency() or make_algorithm(kind)
    algorithms[kind] = algorithm
  end
  return algorithm
end

-- The record; nil if it is missing or malformed.
local function record_of(value)
  if type(value) ~= 'string' or #value < RECORD_BYTES then
    return nil
  end
  local format, settled, digest, end_us, last_us, actual, tokens, count = unpack(RECORD, value)
  local first = RECORD_BYTES + count * ATTEMPT_BYTES
  if format ~= FORMAT or first > #value or (#value - first) % ENTRY_BYTES > 0 then
    return nil
  end
  return {
    is_settled = settled == 1,
    digest = digest,
    end_us = end_us,
    last_us = last_us,
    actual = actual,
    tokens = tokens,
    attempts = sub(value, RECORD_BYTES + 1, first),
    entries = sub(value, first + 1),
  }
end

local function keep(record)
  local value = pack(
    RECORD,
    FORMAT,
    record.is_settled and 1 or 0,
    record.digest,
    record.end_us,
    record.last_us,
    record.actual,
    record.tokens,
    #record.attempts / ATTEMPT_BYTES
  ) .. record.attempts .. record.entries
  local left_s = record.end_us > now_us and ceil((record.end_us - now_us) / US_PER_S) or 0
  call('SET', KEYS[1], value, 'EX', left_s + GRACE_S)
end

-- The place of a bucket's entry in the record; nil if it has none.
local function place_of(record, key)
  local name = sub(key, -NUMBER_BYTES)
  for place = 1, #record.entries, ENTRY_BYTES do
    if sub(record.entries, place, place + NUMBER_BYTES - 1) == name then
      return place
    end
  end
end

-- The place of an attempt in the record; nil if it is not in it.
local function place_of_attempt(record, attempt)
  for place = 1, #record.attempts, ATTEMPT_BYTES do
    if sub(record.attempts, place, place + ATTEMPT_BYTES - 1) == attempt then
      return place
    end
  end
end
