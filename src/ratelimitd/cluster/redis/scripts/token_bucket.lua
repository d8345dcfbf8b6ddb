-- Token bucket: the twin of algorithms/token_bucket.py and of its account in ledger/accounts.py.
--
-- Spent is up to 2^82 units, `window_us` units per token, and more when overdrawn. It is stored as x whole tokens and
-- y units, y < window_us < 2^51: so a charge is one addition, and only the product of a time with a limit or with
-- tokens can pass 2^53. Dividing such a product leaves a small remainder, which `difference` computes exactly.
--
--     head · x (8) · y (8) · at_us (8)

local TOKEN_BUCKET = 1

local function make_token_bucket()
  local STATE = '<BBI4I8I4I8I8I8'
  local STATE_BYTES = HEAD_BYTES + 24
  local LIMB = 131072 -- 2^17

  -- a × b − c × d. The result must be small, a and c below 2^51, b and d below 2^31.
  local function difference(a, b, c, d)
    local a0, c0 = a % LIMB, c % LIMB
    a, c = (a - a0) / LIMB, (c - c0) / LIMB
    local a1, c1 = a % LIMB, c % LIMB
    local a2, c2 = (a - a1) / LIMB, (c - c1) / LIMB
    return ((a2 * b - c2 * d) * LIMB + (a1 * b - c1 * d)) * LIMB + (a0 * b - c0 * d)
  end

  -- Quotient and remainder of elapsed_us × limit / window_us, for elapsed_us < window_us.
  local function tokens_of(elapsed_us, limit, window_us)
    local units = elapsed_us * limit
    if units < EXACT then
      local rest = units % window_us
      return (units - rest) / window_us, rest
    end
    -- The quotient is below 2^31, so in doubles it is off by one at most.
    local tokens = floor(units / window_us)
    local rest = difference(elapsed_us, limit, window_us, tokens)
    if rest < 0 then
      return tokens - 1, rest + window_us
    end
    if rest >= window_us then
      return tokens + 1, rest - window_us
    end
    return tokens, rest
  end

  -- `from_us` plus the time to refill x tokens and y units, in seconds, rounded up.
  local function refill_seconds(from_us, x, y, limit, window_us)
    local rest = x % limit
    local windows_s = (x - rest) / limit * (window_us / US_PER_S)
    local units = rest * window_us + y
    if units < EXACT then
      return windows_s + seconds(from_us, ceil(units / limit))
    end
    -- The quotient is up to 2^51: in doubles it is slightly off, which the remainder corrects.
    local quotient = floor(rest * window_us / limit)
    local beyond_us = ceil((difference(window_us, rest, quotient, limit) + y) / limit)
    return windows_s + seconds(from_us, quotient + beyond_us)
  end

  -- (x, y, latest time) at now_us.
  local function refilled(x, y, at_us, limit, window_us, now_us)
    if now_us <= at_us then
      return x, y, at_us
    end
    local elapsed_us = now_us - at_us
    if elapsed_us >= window_us then
      local rest = elapsed_us % window_us
      x = x - (elapsed_us - rest) / window_us * limit
      elapsed_us = rest
    end
    if x >= 0 then
      local tokens, units = tokens_of(elapsed_us, limit, window_us)
      x, y = x - tokens, y - units
      if y < 0 then
        x, y = x - 1, y + window_us
      end
    end
    if x < 0 then
      return 0, 0, now_us
    end
    return x, y, now_us
  end

  local function read(value, window_us)
    if #value ~= STATE_BYTES then
      return nil
    end
    local format, kind, generation, revision, limit, x, y, at_us = unpack(STATE, value)
    if x > LARGEST or y >= window_us or at_us > LARGEST then
      return nil
    end
    return format, kind, generation, revision, limit, x, y, at_us
  end

  local function write(generation, revision, limit, x, y, at_us)
    return pack(STATE, FORMAT, TOKEN_BUCKET, generation, revision, limit, x, y, at_us)
  end

  local function capped(x, y, at_us, capacity)
    if at_us and x >= capacity then
      return capacity, 0, at_us
    end
    return x, y, at_us
  end

  local function used(x, y, at_us, limit, window_us, now_us)
    if not at_us then
      return 0
    end
    x, y = refilled(x, y, at_us, limit, window_us, now_us)
    return y > 0 and x + 1 or x
  end

  local function charged(x, y, at_us, limit, window_us, text, place, runs)
    for run = place, place + (runs - 1) * 16, 16 do
      local run_us, tokens = unpack('<I8I8', text, run)
      if at_us then
        x, y, at_us = refilled(x, y, at_us, limit, window_us, run_us)
      else
        x, y, at_us = 0, 0, run_us
      end
      x = saturated(x + tokens)
    end
    return x, y, at_us
  end

  -- Refunds a charge after which the bucket lacked `spent` tokens: returns the state, and the number of refunded
  -- tokens, rounded up. Tokens that may have been refilled since are not refunded.
  local function refunded(x, y, at_us, limit, window_us, charged_us, tokens, spent)
    if spent <= 0 then
      return x, y, 0
    end
    local left, units = refilled(spent, 0, charged_us, limit, window_us, at_us)
    if left >= tokens then
      left, units = tokens, 0
    end
    if left > x or (left == x and units > y) then
      left, units = x, y
    end
    x, y = x - left, y - units
    if y < 0 then
      x, y = x - 1, y + window_us
    end
    return x, y, units > 0 and left + 1 or left
  end

  local function judged(x, y, at_us, limit, window_us, now_us, cost, burst)
    local capacity = capacity_of(limit, burst)
    local spent, units, time_us = 0, 0, now_us
    if at_us then
      spent, units, time_us = refilled(x, y, at_us, limit, window_us, now_us)
    end
    local wanted = spent + cost
    if wanted < capacity or (wanted == capacity and units == 0) then
      local remaining = capacity - wanted
      if units > 0 then
        remaining = remaining - 1
      end
      local retry_after = 0
      if remaining == 0 then
        retry_after = delay(refill_seconds(time_us - now_us, wanted + 1 - capacity, units, limit, window_us))
      end
      local reset_time = refill_seconds(time_us, wanted, units, limit, window_us)
      return true, wanted, units, time_us, remaining, reset_time, retry_after, WITHIN_LIMIT
    end

    local remaining = capacity - spent
    if units > 0 then
      remaining = remaining - 1
    end
    if remaining < 0 then
      remaining = 0
    end
    local reset_time = refill_seconds(time_us, spent, units, limit, window_us)
    if cost > capacity then
      return false, x, y, at_us, remaining, reset_time, window_us / US_PER_S, COST_EXCEEDS_LIMIT
    end
    local retry_after = delay(refill_seconds(time_us - now_us, wanted - capacity, units, limit, window_us))
    return false, x, y, at_us, remaining, reset_time, retry_after, LIMIT_EXCEEDED
  end

  return {
    kind = TOKEN_BUCKET,
    read = read,
    write = write,
    capped = capped,
    used = used,
    charged = charged,
    refunded = refunded,
    judged = judged,
  }
end
