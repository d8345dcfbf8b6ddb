-- Applies one numbered batch of one sender, exactly once: the twin of `Ledger.apply` in tests/ledger_model.py.
--
-- KEYS[1]   the record of the sender: its last number and the grants of that batch
-- KEYS[2…]  the buckets, one for each update
-- ARGV[1]   number (8), and of each update:
--               algorithm (1) · generation or -1 (4, signed) · revision (8) · limit (4) · burst (4) ·
--               window in s (4) · runs (4) · asks (4) · each run: time (8), tokens (8) · each ask: time (8), cost (8)
--           an update with refunds has 128 added to the algorithm, and their number (4) and each of them before
--           the runs: generation (4) · revision (8) · time (8) · tokens (8) · spent (8) · refunded before (8)
--
-- Returns 0 for a batch that is older than the last one, else
--     { a byte 0 or 1 for each ask, number of malformed values, the value of each bucket … }
--
-- A malformed value is replaced by a full bucket, so that it affects no other bucket, and not for long.

local UPDATE = '<Bi4I8I4I4I4I4I4'
local PAIR = '<I8I8'
local REFUND = '<I4I8I8I8I8I8'
local REFUND_BYTES = 44
local REFUNDS = 128
local RECORD = '<BI8'
local RECORD_BYTES = 9

-- The first runs that fit into the bucket, as text, and their number.
local function fitting(room, text, place, runs)
  local pieces, count = {}, 0
  for run = place, place + (runs - 1) * 16, 16 do
    if room <= 0 then
      break
    end
    local at_us, tokens = unpack(PAIR, text, run)
    count = count + 1
    pieces[count] = pack(PAIR, at_us, tokens < room and tokens or room)
    room = room - tokens
  end
  return table.concat(pieces), count
end

-- A bucket after the refunds in the text from `place` on: the twin of `refunded` in ledger/shared_state.py. A bucket
-- that starts full has no charges to refund.
local function given_back(algorithm, generation, revision, limit, x, y, at_us, total, window_us, text, place, count)
  for refund = place, place + (count - 1) * REFUND_BYTES, REFUND_BYTES do
    local its_generation, its_revision, charged_us, tokens, spent, before = unpack(REFUND, text, refund)
    local is_there = at_us and charged_us <= at_us and total >= before
    if is_there and its_generation == generation and its_revision == revision then
      local given
      x, y, given =
        algorithm.refunded(x, y, at_us, limit, window_us, charged_us, tokens, spent - (total - before))
      total = total + given
    end
  end
  return x, y, total
end

local text = ARGV[1]
local number, place = unpack('<I8', text)
local record = value_at(KEYS[1])
local repeated, kept = false, nil
if type(record) == 'string' and #record >= RECORD_BYTES then
  local format, last = unpack(RECORD, record)
  if format == FORMAT and number <= last then
    if number < last then
      return 0
    end
    repeated, kept = true, sub(record, RECORD_BYTES + 1)
  end
end

local algorithms = {}
local reply, corrupt = {}, 0
local grants, granted = {}, 0

for index = 2, #KEYS do
  local key = KEYS[index]
  local kind, generation, revision, limit, burst, window_s, runs, asks
  kind, generation, revision, limit, burst, window_s, runs, asks, place = unpack(UPDATE, text, place)
  local refunds, first_refund = 0, nil
  if kind > REFUNDS then
    kind = kind - REFUNDS
    refunds, first_refund = unpack('<I4', text, place)
    place = first_refund + refunds * REFUND_BYTES
  end
  local first_ask = place + runs * 16
  local after = first_ask + asks * 16
  local algorithm, window_us = algorithms[kind], window_s * US_PER_S
  if not algorithm then
    algorithm = make_algorithm(kind)
    algorithms[kind] = algorithm
  end
  local value = value_at(key)

  if repeated and value and stored(algorithm, value, window_us) then
    reply[index + 1] = value
  else
    local its_generation, its_revision, its_limit, its_burst, x, y, at_us, is_corrupt, _, refunded, mark =
      opened(algorithm, value, generation, revision, limit, burst, window_us)
    if is_corrupt then
      corrupt = corrupt + 1
    end

    if not repeated then
      if refunds > 0 then
        x, y, refunded = given_back(
          algorithm,
          its_generation,
          its_revision,
          its_limit,
          x,
          y,
          at_us,
          refunded,
          window_us,
          text,
          first_refund,
          refunds
        )
      end
      if runs > 0 and (generation < 0 or generation == its_generation) then
        local charges = text
        if revision < its_revision and (limit ~= its_limit or burst ~= its_burst) then
          -- Spends under an older limit take at most what is left under the new one, and owe nothing.
          local last_us = unpack('<I8', text, first_ask - 16)
          local room = capacity_of(its_limit, its_burst) - algorithm.used(x, y, at_us, its_limit, window_us, last_us)
          charges, runs = fitting(room, text, place, runs)
          place = 1
        end
        if runs > 0 then
          x, y, at_us = algorithm.charged(x, y, at_us, its_limit, window_us, charges, place, runs)
        end
      end
      for ask = first_ask, after - 16, 16 do
        local ask_us, cost = unpack(PAIR, text, ask)
        local allowed
        allowed, x, y, at_us = algorithm.judged(x, y, at_us, its_limit, window_us, ask_us, cost, its_burst)
        granted = granted + 1
        grants[granted] = allowed and '\1' or '\0'
      end
    end

    local new = written(algorithm, its_generation, its_revision, its_limit, its_burst, x, y, at_us, refunded, mark)
    -- A full bucket that was never reset equals a missing one.
    if not repeated and new ~= value and (value or at_us or its_generation > 0) then
      call('SET', key, new, 'EX', ttl_of(algorithm, window_us, its_limit, its_burst, at_us))
    end
    reply[index + 1] = new
  end
  place = after
end

kept = kept or table.concat(grants)
if not repeated then
  call('SET', KEYS[1], pack(RECORD, FORMAT, number) .. kept, 'EX', LEAST_TTL)
end
reply[1], reply[2] = kept, corrupt
return reply
