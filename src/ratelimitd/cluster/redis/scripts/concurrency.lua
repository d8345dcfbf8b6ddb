-- Concurrency: the twin of algorithms/concurrency.py. Open holds of other buckets are kept alike, to be counted.
--
-- The bucket is a sorted set: the number of each open hold by its end in µs. Before them is '', whose score is minus
-- how many they are, so that nothing that is judged looks at all of them.
--
-- x is how many slots are in use, y the key. Only scripts that need it load this: each function costs a call some time.

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

  -- How many holds are open at now_us, those apart that have ended; and whether something else was there.
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

  -- Gives a hold its slot until end_us; returns how many there are then.
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

  -- When the slot at a place ends, from 1 on, or the last one at -1.
  local function ends_at(key, place)
    local found = call('ZRANGE', key, place, place, 'WITHSCORES')
    return found[2] and tonumber(found[2]) or time_of_check(-1) -- equivalent: it is there, unless somebody removed it
  end

  -- Where x slots are in use, `taken` of them by the check itself: allowed, remaining, reset_time, retry_after, reason.
  local function told(x, y, limit, now_us, taken)
    local remaining = x < limit and limit - x or 0
    local reset_time = ceil((x > 0 and ends_at(y, -1) or now_us) / US_PER_S)
    local retry_after = 0
    if remaining == 0 then
      -- The first of those that have to end for one to be free.
      retry_after = delay(ceil((ends_at(y, x - limit + 1) - now_us) / US_PER_S))
    end
    if x - taken < limit then
      return true, remaining, reset_time, retry_after, WITHIN_LIMIT
    end
    return false, 0, reset_time, retry_after > 1 and retry_after or 1, LIMIT_EXCEEDED
  end

  -- By the store's clock, whatever that of the check says: slots end by it.
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
