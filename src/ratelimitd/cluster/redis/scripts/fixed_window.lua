-- Fixed window: the twin of algorithms/fixed_window.py and of its account in ledger/accounts.py.
--
--     head · x, the count (8) · at_us (8)                    y is always 0

local FIXED_WINDOW = 2

local function make_fixed_window()
  local STATE = '<BBI4I8I4I8I8'
  local STATE_BYTES = HEAD_BYTES + 16

  local function read(value)
    if #value ~= STATE_BYTES then
      return nil
    end
    local format, kind, generation, revision, limit, count, at_us = unpack(STATE, value)
    if count > LARGEST or at_us > LARGEST then
      return nil
    end
    return format, kind, generation, revision, limit, count, 0, at_us
  end

  local function write(generation, revision, limit, count, _, at_us)
    return pack(STATE, FORMAT, FIXED_WINDOW, generation, revision, limit, count, at_us)
  end

  local function capped(count, y, at_us, limit)
    if at_us and count > limit then
      return limit, y, at_us
    end
    return count, y, at_us
  end

  local function used(count, _, at_us, _, window_us, now_us)
    if at_us and now_us - now_us % window_us <= at_us - at_us % window_us then
      return count
    end
    return 0
  end

  local function charged(count, y, at_us, _, window_us, text, place, runs)
    for run = place, place + (runs - 1) * 16, 16 do
      local run_us, tokens = unpack('<I8I8', text, run)
      local start_us = run_us - run_us % window_us
      local stored_start_us = at_us and at_us - at_us % window_us or -1
      if start_us > stored_start_us then
        count, at_us = saturated(tokens), run_us
      elseif start_us == stored_start_us then
        count = saturated(count + tokens)
        if run_us > at_us then
          at_us = run_us
        end
      end
    end
    return count, y or 0, at_us
  end

  local function judged(x, y, at_us, limit, window_us, now_us, cost)
    local count, time_us = 0, now_us
    if at_us and at_us > now_us then
      time_us = at_us
    end
    local start_us = time_us - time_us % window_us
    if at_us and at_us >= start_us then
      count = x < limit and x or limit
    end
    local window_s = window_us / US_PER_S
    local reset_time = start_us / US_PER_S + window_s -- the end in µs could pass 2^53
    local wanted = count + cost
    if wanted <= limit then
      local retry_after = 0
      if wanted == limit then
        retry_after = delay(ceil((start_us - now_us) / US_PER_S) + window_s)
      end
      return true, wanted, 0, time_us, limit - wanted, reset_time, retry_after, WITHIN_LIMIT
    end
    if cost > limit then
      return false, x, y, at_us, limit - count, reset_time, window_s, COST_EXCEEDS_LIMIT
    end
    local retry_after = delay(ceil((start_us - now_us) / US_PER_S) + window_s)
    return false, x, y, at_us, limit - count, reset_time, retry_after, LIMIT_EXCEEDED
  end

  return {
    kind = FIXED_WINDOW,
    read = read,
    write = write,
    capped = capped,
    used = used,
    charged = charged,
    judged = judged,
  }
end
