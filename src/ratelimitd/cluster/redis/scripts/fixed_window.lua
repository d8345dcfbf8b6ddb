-- Fixed window: the twin of algorithms/fixed_window.py and of its account in ledger/accounts.py.
--
--     head · x, the count (8) · y, the count of the window before (8) · at_us (8)

local FIXED_WINDOW = 2

local function make_fixed_window()
  local STATE = '<BBI4I8I4I8I8I8'
  local STATE_BYTES = HEAD_BYTES + 24

  local function read(value)
    if #value ~= STATE_BYTES then
      return nil
    end
    local format, kind, generation, revision, limit, count, before, at_us = unpack(STATE, value)
    if count > LARGEST or before > LARGEST or at_us > LARGEST then
      return nil
    end
    return format, kind, generation, revision, limit, count, before, at_us
  end

  local function write(generation, revision, limit, count, before, at_us)
    return pack(STATE, FORMAT, FIXED_WINDOW, generation, revision, limit, count, before, at_us)
  end

  local function capped(count, before, at_us, limit)
    if not at_us then
      return count, before, at_us
    end
    return count < limit and count or limit, before < limit and before or limit, at_us
  end

  -- The state in the window of now_us, or in its own window if that is later: an overdraft counts in the next window.
  -- The product may pass 2^53, but is then larger than any count.
  local function in_window_of(now_us, count, before, at_us, limit, window_us)
    if not at_us then
      return 0, 0, now_us
    end
    local windows = (now_us - now_us % window_us - (at_us - at_us % window_us)) / window_us
    if windows <= 0 then
      return count, before, at_us
    end
    before = count - (windows - 1) * limit
    -- equivalent: >= 0 is the same as > 0, since the alternative is 0
    return before > limit and before - limit or 0, before > 0 and before or 0, now_us
  end

  local function used(count, before, at_us, limit, window_us, now_us)
    return (in_window_of(now_us, count, before, at_us, limit, window_us))
  end

  local function charged(count, before, at_us, limit, window_us, text, place, runs)
    for run = place, place + (runs - 1) * 16, 16 do
      local run_us, tokens = unpack('<I8I8', text, run)
      count, before, at_us = in_window_of(run_us, count, before, at_us, limit, window_us)
      if run_us >= at_us - at_us % window_us then
        count = saturated(count + tokens)
        if run_us > at_us then
          at_us = run_us
        end
      else
        -- A late charge: it does not count the overdraft of earlier windows.
        before = saturated(before + tokens)
        if before > limit then
          count = saturated(count + (before - limit < tokens and before - limit or tokens))
        end
      end
    end
    return count, before, at_us
  end

  -- The state after the refund of a charge, if it was in the same window; and the number of refunded tokens.
  local function refunded(count, before, at_us, _, window_us, charged_us, tokens)
    if charged_us < at_us - at_us % window_us then
      return count, before, 0
    end
    if tokens > count then
      tokens = count
    end
    return count - tokens, before, tokens
  end

  local function judged(x, y, at_us, limit, window_us, now_us, cost)
    local count, before, time_us = in_window_of(now_us, x, y, at_us, limit, window_us)
    local windows_to_full, windows_to_pass = 0, 0 -- beyond this one, while later windows pay off an overdraft
    if count > limit then
      if window_us < LEAST_CALENDAR_US then
        windows_to_full = floor((count - 1) / limit)
        windows_to_pass = floor((count + cost - 1) / limit) - 1
      end
      count = limit
    end
    if now_us > time_us then -- equivalent: >= assigns the value it has
      time_us = now_us
    end
    local start_us = time_us - time_us % window_us
    local window_s = window_us / US_PER_S
    local reset_time = start_us / US_PER_S + window_s -- the end in µs could pass 2^53
    local wanted = count + cost
    if wanted <= limit then
      local retry_after = 0
      if wanted == limit then
        retry_after = delay(ceil((start_us - now_us) / US_PER_S) + window_s)
      end
      return true, wanted, before, time_us, limit - wanted, reset_time, retry_after, WITHIN_LIMIT
    end
    reset_time = reset_time + windows_to_full * window_s
    if cost > limit then
      return false, x, y, at_us, limit - count, reset_time, window_s, COST_EXCEEDS_LIMIT
    end
    local retry_after = delay(ceil((start_us - now_us) / US_PER_S) + (1 + windows_to_pass) * window_s)
    return false, x, y, at_us, limit - count, reset_time, retry_after, LIMIT_EXCEEDED
  end

  return {
    kind = FIXED_WINDOW,
    has_calendars = true,
    read = read,
    write = write,
    capped = capped,
    used = used,
    charged = charged,
    refunded = refunded,
    judged = judged,
  }
end
