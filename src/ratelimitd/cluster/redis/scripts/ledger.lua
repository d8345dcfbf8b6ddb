-- Reads and writes stored buckets: the twin of ledger/shared_state.py.

local function make_algorithm(kind)
  if kind == TOKEN_BUCKET then
    return make_token_bucket()
  elseif kind == FIXED_WINDOW then
    return make_fixed_window()
  end
  return make_sliding_window()
end

-- The fields of a value: generation, revision, limit, burst, x, y, at_us, refunded, mark; nil if it is no bucket of
-- this algorithm.
local function stored(algorithm, value, window_us)
  if type(value) ~= 'string' or #value < HEAD_BYTES then
    return nil
  end
  local refunded, mark, more = 0, 0, string.byte(value)
  if more == FORMAT_OF_REFUNDED and #value >= HEAD_BYTES + 8 then
    refunded = unpack('<I8', value, HEAD_BYTES + 1)
    value = string.char(FORMAT) .. sub(value, 2, HEAD_BYTES) .. sub(value, HEAD_BYTES + 9)
  elseif more == FORMAT_OF_HELD and #value >= HEAD_BYTES + 16 then
    refunded, mark = unpack('<I8I8', value, HEAD_BYTES + 1)
    value = string.char(FORMAT) .. sub(value, 2, HEAD_BYTES) .. sub(value, HEAD_BYTES + 17)
  end
  local format, kind, generation, revision, limit, x, y, at_us
  local burst = 0
  if algorithm.kind == TOKEN_BUCKET and (#value - HEAD_BYTES) % 8 == BURST_BYTES then
    burst = unpack(BURST, value, #value - BURST_BYTES + 1)
    value = sub(value, 1, -BURST_BYTES - 1)
  end
  if #value == HEAD_BYTES then
    format, kind, generation, revision, limit = unpack(HEAD, value)
  else
    format, kind, generation, revision, limit, x, y, at_us = algorithm.read(value, window_us)
  end
  if format ~= FORMAT or kind ~= algorithm.kind or limit < 1 or limit > INT32_MAX or revision > LARGEST then
    return nil
  end
  if burst > INT32_MAX or refunded > LARGEST or mark > LARGEST then
    return nil
  end
  if generation > INT32_MAX then -- nodes cannot encode it: -1 stands for none
    return nil
  end
  return generation, revision, limit, burst, x, y, at_us, refunded, mark
end

local function written(algorithm, generation, revision, limit, burst, x, y, at_us, refunded, mark)
  local value
  if at_us then
    value = algorithm.write(generation, revision, limit, x, y, at_us)
  else
    value = pack(HEAD, FORMAT, algorithm.kind, generation, revision, limit)
  end
  if burst > 0 then
    value = value .. pack(BURST, burst)
  end
  if mark > 0 then
    local head = string.char(FORMAT_OF_HELD) .. sub(value, 2, HEAD_BYTES)
    return head .. pack('<I8I8', refunded, mark) .. sub(value, HEAD_BYTES + 1)
  end
  if refunded == 0 then
    return value
  end
  local head = string.char(FORMAT_OF_REFUNDED) .. sub(value, 2, HEAD_BYTES)
  return head .. pack('<I8', refunded) .. sub(value, HEAD_BYTES + 1)
end

-- A bucket for a node at `revision`, with `limit` and `burst`, that charged `generation`, or -1. A missing or malformed
-- bucket, or one of an older generation, starts full; an edit of limit or burst caps what is owed. The last four values
-- are: whether the value was malformed, whether there was such an edit, the number of refunded tokens, and the mark.
local function opened(algorithm, value, generation, revision, limit, burst, window_us)
  local its_generation, its_revision, its_limit, its_burst, x, y, at_us, refunded, mark
  if value then
    its_generation, its_revision, its_limit, its_burst, x, y, at_us, refunded, mark = stored(algorithm, value, window_us)
  end
  local corrupt = value and not its_generation
  if not its_generation or generation > its_generation then
    if generation < 0 then -- equivalent: 0 is set to 0
      generation = 0
    end
    return generation, revision, limit, burst, nil, nil, nil, corrupt, false, 0, 0
  end
  -- At the same revision the limit differs after an assignment to a plan has ended.
  if revision >= its_revision then
    local edited = limit ~= its_limit or burst ~= its_burst
    if edited then
      local its_x, its_y = x, y
      x, y, at_us = algorithm.capped(x, y, at_us, capacity_of(limit, burst))
      if limit < its_limit or x ~= its_x or y ~= its_y then
        mark = 0
      end
    end
    return its_generation, revision, limit, burst, x, y, at_us, corrupt, edited, refunded, mark
  end
  return its_generation, its_revision, its_limit, its_burst, x, y, at_us, corrupt, false, refunded, mark
end
