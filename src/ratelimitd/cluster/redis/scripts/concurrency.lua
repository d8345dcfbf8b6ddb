-- Concurrency: the twin of algorithms/concurrency.py. Open holds of other buckets are stored alike, to be counted.
--
-- The bucket is a sorted set: the number of each open hold, by its end in µs. Its first member is '', whose score is
-- minus their count, so that a check need not read all of them.
--
-- x is the number of slots in use, y the key. Loaded only by scripts that need it: each function adds to a call's time.

local CONCURRENCY = 4

local function make_concurrency()
  local KEPT_S = LEAST_TTL_S + 60 -- no hold ends later than an hour after it was made or extended

  local function score(number)
    return string.format('%.0f', number)
  end

  local function count_as(key, count)
    if count > 0 then
      call('ZADD', key, score(-count), '')
    else
      call('ZREM', key, '')
    end
  end

  -- Removes ended holds; returns the number open at now_us, and whether the value was malformed.
  local function opened(key, now_us)
    local first = pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
    if first.err and not is_of_another_type(first) then
      first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
    end
    if not first.err and #first == 0 then
      return 0, false
    end
    local count = not first.err and first[1] == '' and -tonumber(first[2])
    if not count or count < 1 or count > INT32_MAX then
      call('EXPIRE', key, 0)
      return 0, true
    end
    local ended = call('ZREMRANGEBYSCORE', key, '(0', score(now_us))
    if ended > 0 then
      count = count > ended and count - ended or 0
      count_as(key, count)
    end
    return count, false
  end

  -- Gives a hold its slot until end_us; returns the new count.
  local function take(count, key, number, end_us)
    if call('ZADD', key, score(end_us), number) == 1 then
      count = count + 1
      count_as(key, count)
    end
    call('EXPIRE', key, KEPT_S)
    return count
  end

  local function free(count, key, number)
    if call('ZREM', key, number) == 1 then
      count_as(key, count - 1)
    end
  end

  local function extend(key, number, end_us)
    call('ZADD', key, 'XX', score(end_us), number)
    call('EXPIRE', key, KEPT_S)
  end

  -- The end of the slot at a place, from 1 on; -1 is the last one.
  local function ends_at(key, place)
    local found = call('ZRANGE', key, place, place, 'WITHSCORES')
    return found[2] and tonumber(found[2]) or time_of_check(-1) -- equivalent: it exists, unless removed by hand
  end

  -- Outcome with x slots in use, `taken` of them by this check: allowed, remaining, reset_time, retry_after, reason.
  local function told(x, y, limit, now_us, taken)
    local remaining = x < limit and limit - x or 0
    local reset_time = ceil((x > 0 and ends_at(y, -1) or now_us) / US_PER_S)
    local retry_after = 0
    if remaining == 0 then
      -- When enough slots have ended for one to be free.
      retry_after = delay(ceil((ends_at(y, x - limit + 1) - now_us) / US_PER_S))
    end
    if x - taken < limit then
      return true, remaining, reset_time, retry_after, WITHIN_LIMIT
    end
    return false, 0, reset_time, retry_after > 1 and retry_after or 1, LIMIT_EXCEEDED
  end

  -- By the store's clock instead of the check's time, because slots end by it.
  local function judged(x, y, at_us, limit)
    local allowed, remaining, reset_time, retry_after, reason = told(x, y, limit, time_of_check(-1), 0)
    return allowed, x, y, at_us, remaining, reset_time, retry_after, reason
  end

  return {
    kind = CONCURRENCY,
    opened = opened,
    take = take,
    free = free,
    extend = extend,
    told = told,
    judged = judged,
  }
end
