-- Makes a bucket full, at its next generation: the twin of `reset` in tests/ledger_model.py.
--
-- KEYS     the bucket, and its open holds, which no longer count; the slots of a concurrency bucket are freed
-- ARGV[1]  algorithm (1) · revision (8) · limit (4) · burst (4) · window in s (4)
-- ARGV[2]  the least generation
--
-- Returns the new value. A malformed bucket is treated as a missing one.

local key = KEYS[1]
local kind, revision, limit, burst, window_s = unpack('<BI8I4I4I4', ARGV[1])
local algorithm = kind == CONCURRENCY and make_concurrency() or make_algorithm(kind)
local window_us = window_s * US_PER_S
local generation = kind ~= CONCURRENCY and stored(algorithm, value_at(key), window_us) or 0
local next_generation = math.max(generation + 1, tonumber(ARGV[2]))
local value = written(algorithm, next_generation, revision, limit, burst, nil, nil, nil, 0, 0)
if kind == CONCURRENCY then
  call('EXPIRE', key, 0)
else
  call('SET', key, value, 'EX', ttl_of(algorithm, window_us, limit, burst))
end
call('EXPIRE', KEYS[2], 0)
return value
