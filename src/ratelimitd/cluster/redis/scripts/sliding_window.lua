-- Sliding-window log: the twin of algorithms/sliding_window.py and of its account in ledger/accounts.py.
--
-- x is the entries as one string, of 16 bytes each, y the sum before the first of them:
--
--     head · y (8) · { time in µs (8) · sum of the tokens up to here (8) } …
--
-- With running sums, the number of tokens in the window is one subtraction, and merging two neighbours drops the first
-- of them. Entries that do not change are not read.

local SLIDING_WINDOW = 3

local function make_sliding_window()
  local STATE = '<BBI4I8I4I8'
  local STATE_BYTES = HEAD_BYTES + 8
  local ENTRY = '<I8I8'
  local MAX_RUNS = 16384
  local MAX_SUM = EXACT / 2
  local PAIR = string.rep('.', 16) .. '(' .. string.rep('.', 16) .. ')'

  local function time_of(entries, entry)
    return (unpack('<I8', entries, entry * 16 - 15))
  end

  local function sum_of(entries, entry, base)
    if entry == 0 then
      return base
    end
    return (unpack('<I8', entries, entry * 16 - 7))
  end

  -- The number of entries up to time_us.
  local function entries_until(entries, time_us)
    local low, high = 0, #entries / 16
    while low < high do
      local middle = ceil((low + high) / 2)
      if time_of(entries, middle) <= time_us then
        low = middle
      else
        high = middle - 1
      end
    end
    return low
  end

  -- The first entry whose running sum is `least` or more; else the last one.
  local function entry_with(entries, base, least)
    local low, high = 1, #entries / 16
    while low < high do
      local middle = floor((low + high) / 2)
      if sum_of(entries, middle, base) < least then
        low = middle + 1
      else
        high = middle
      end
    end
    return low
  end

  -- The log without the entries that have left the window at time_us.
  local function left(entries, base, time_us, window_us)
    local gone = entries_until(entries, time_us - window_us)
    if gone == 0 then
      return entries, base
    end
    return sub(entries, gone * 16 + 1), sum_of(entries, gone, base)
  end

  -- The log within its length, with exact sums.
  local function bounded(entries, base)
    while #entries > MAX_RUNS * 16 do
      -- Every two neighbours become one, at the later time; an odd last one stays as it is.
      entries = string.gsub(entries, PAIR, '%1')
    end
    -- equivalent: rebased entries mean the same, so the bound may be one less or more
    if base > 0 and sum_of(entries, #entries / 16) > MAX_SUM then
      local rebased = {}
      for entry = 1, #entries / 16 do
        rebased[entry] = pack(ENTRY, time_of(entries, entry), sum_of(entries, entry) - base)
      end
      return table.concat(rebased), 0
    end
    return entries, base
  end

  local function read(value)
    local runs = (#value - STATE_BYTES) / 16
    if runs < 1 or runs > MAX_RUNS or runs % 1 ~= 0 then
      return nil
    end
    local format, kind, generation, revision, limit, base = unpack(STATE, value)
    local entries = sub(value, STATE_BYTES + 1)
    local last_us, total = unpack(ENTRY, entries, #entries - 15)
    if last_us > LARGEST or time_of(entries, 1) > last_us or total > LARGEST or base > total then
      return nil
    end
    return format, kind, generation, revision, limit, entries, base, last_us
  end

  local function write(generation, revision, limit, entries, base)
    return pack(STATE, FORMAT, SLIDING_WINDOW, generation, revision, limit, base) .. entries
  end

  local function capped(entries, base, at_us)
    return entries, base, at_us
  end

  local function used(entries, base, at_us, _, window_us, now_us)
    if not at_us then
      return 0
    end
    local gone = entries_until(entries, now_us - window_us)
    return sum_of(entries, #entries / 16, base) - sum_of(entries, gone, base)
  end

  -- Entries before the first run stay a string; later ones are decoded and merged with the runs.
  local function charged(entries, base, at_us, _, window_us, text, place, runs)
    if not at_us then
      entries, base = '', 0
    end
    local after = place + runs * 16
    local run_us, tokens = unpack(ENTRY, text, place)
    local kept = entries_until(entries, run_us - 1)
    local last = #entries / 16
    local sum = sum_of(entries, kept, base)
    local pieces, count = { sub(entries, 1, kept * 16) }, 1
    local before, entry = sum, kept + 1
    local entry_us, entry_sum
    if entry <= last then
      entry_us, entry_sum = unpack(ENTRY, entries, entry * 16 - 15)
    end
    while run_us or entry_us do
      local next_us = run_us
      if not run_us or (entry_us and entry_us < run_us) then
        next_us = entry_us
      end
      if entry_us == next_us then
        sum = saturated(sum + (entry_sum - before))
        before, entry, entry_us = entry_sum, entry + 1, nil
        if entry <= last then
          entry_us, entry_sum = unpack(ENTRY, entries, entry * 16 - 15)
        end
      end
      while run_us == next_us do
        sum = saturated(sum + tokens)
        place, run_us = place + 16, nil
        if place < after then
          run_us, tokens = unpack(ENTRY, text, place)
        end
      end
      count = count + 1
      pieces[count] = pack(ENTRY, next_us, sum)
      at_us = next_us
    end
    entries, base = left(table.concat(pieces), base, at_us, window_us)
    entries, base = bounded(entries, base)
    return entries, base, at_us
  end

  -- Removes the latest `tokens` up to a time; returns the log and the number removed. The last entry stays, even
  -- without tokens, so that the log keeps its latest time.
  local function refunded(entries, base, _, _, _, charged_us, tokens)
    local last, until_then = #entries / 16, entries_until(entries, charged_us)
    local sum = sum_of(entries, until_then, base)
    local taken = tokens < sum - base and tokens or sum - base
    if taken == 0 then
      return entries, base, 0
    end
    local left = sum - taken
    local kept = until_then -- entries, the last of which may have lost some of its tokens
    while kept > 0 and sum_of(entries, kept - 1, base) >= left do
      kept = kept - 1
    end
    local pieces, count = {}, 0
    if kept > 0 then
      pieces, count = { sub(entries, 1, (kept - 1) * 16), pack(ENTRY, time_of(entries, kept), left) }, 2
    end
    for entry = until_then + 1, last do
      count = count + 1
      pieces[count] = pack(ENTRY, time_of(entries, entry), sum_of(entries, entry) - taken)
    end
    if until_then == last and kept < last then
      pieces[count + 1] = pack(ENTRY, time_of(entries, last), left)
    end
    return table.concat(pieces), base, taken
  end

  local function judged(x, y, at_us, limit, window_us, now_us, cost)
    local window_s = window_us / US_PER_S
    if not at_us then
      if cost > limit then
        return false, x, y, at_us, limit, ceil(now_us / US_PER_S), window_s, COST_EXCEEDS_LIMIT
      end
      local retry_after = cost == limit and delay(window_s) or 0
      local reset_time = ceil(now_us / US_PER_S) + window_s
      return true, pack(ENTRY, now_us, cost), 0, now_us, limit - cost, reset_time, retry_after, WITHIN_LIMIT
    end

    local time_us = now_us > at_us and now_us or at_us
    local entries, base = left(x, y, time_us, window_us)
    local runs = #entries / 16
    local total = sum_of(entries, runs, base)
    -- Sums or times that do not ascend, so the log is malformed and starts empty. `read` validates only the ends.
    if base < y or base > total then
      return judged('', 0, nil, limit, window_us, now_us, cost)
    end
    local used = total - base
    if used + cost <= limit then
      local remaining, retry_after = limit - used - cost, 0
      if remaining == 0 then
        -- A refund may leave an entry without tokens; skip it.
        local oldest_us = used > 0 and time_of(entries, entry_with(entries, base, base + 1)) or time_us
        if oldest_us > time_us then
          return judged('', 0, nil, limit, window_us, now_us, cost)
        end
        retry_after = delay(ceil((oldest_us - now_us) / US_PER_S) + window_s)
      end
      if runs == 0 then
        base, total = 0, 0
      elseif at_us == time_us then
        entries = sub(entries, 1, -17)
      end
      entries, base = bounded(entries .. pack(ENTRY, time_us, total + cost), base)
      local reset_time = ceil(time_us / US_PER_S) + window_s
      return true, entries, base, time_us, remaining, reset_time, retry_after, WITHIN_LIMIT
    end

    local remaining = used < limit and limit - used or 0
    local reset_time = ceil(time_us / US_PER_S)
    if used > 0 then
      local newest_us = at_us
      if sum_of(entries, runs - 1, base) == total then
        -- A refund has left the latest entry without tokens.
        newest_us = time_of(entries, entry_with(entries, base, total))
        if newest_us > at_us then
          return judged('', 0, nil, limit, window_us, now_us, cost)
        end
      end
      reset_time = ceil(newest_us / US_PER_S) + window_s
    end
    if cost > limit then
      return false, x, y, at_us, remaining, reset_time, window_s, COST_EXCEEDS_LIMIT
    end
    -- The cost fits once this entry has left the window.
    local leaves_us = time_of(entries, entry_with(entries, base, base + used + cost - limit))
    if leaves_us <= time_us - window_us or leaves_us > time_us then
      return judged('', 0, nil, limit, window_us, now_us, cost)
    end
    local retry_after = delay(ceil((leaves_us - now_us) / US_PER_S) + window_s)
    return false, x, y, at_us, remaining, reset_time, retry_after, LIMIT_EXCEEDED
  end

  return {
    kind = SLIDING_WINDOW,
    read = read,
    write = write,
    capped = capped,
    used = used,
    charged = charged,
    refunded = refunded,
    judged = judged,
  }
end
