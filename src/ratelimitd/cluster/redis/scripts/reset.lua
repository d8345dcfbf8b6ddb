-- Makes buckets full, each at its next generation: the twin of `reset` in ledger/shared_state.py.
--
-- KEYS     the buckets, then the open holds of each, which no longer count; the slots of a concurrency bucket are freed
-- ARGV[1]  of each: algorithm (1) · revision (8) · limit (4) · burst (4) · window in s (4)
-- ARGV[2]  the least generation of any
--
-- Returns the new values. A malformed bucket is treated as a missing one.

local RULE = '<BI8I4I4I4'

local least = tonumber(ARGV[2])
local values, place = {}, 1
for index = 1, #KEYS / 2 do
  local key = KEYS[index]
  local kind, revision, limit, burst, window_s
  kind, revision, limit, burst, window_s, place = unpack(RULE, ARGV[1], place)
  local algorithm = kind == CONCURRENCY and make_concurrency() or make_algorithm(kind)
  local window_us = window_s * US_PER_S
  local generation = kind ~= CONCURRENCY and stored(algorithm, value_at(key), window_us) or 0
  local next_generation = math.max(generation + 1, least)
  values[index] = written(algorithm, next_generation, revision, limit, burst, nil, nil, nil, 0, 0)
  if kind == CONCURRENCY then
    call('EXPIRE', key, 0)
  else
    call('SET', key, values[index], 'EX', ttl_of(algorithm, window_us, limit, burst))
  end
  call('EXPIRE', KEYS[#KEYS / 2 + index], 0)
end
return values
