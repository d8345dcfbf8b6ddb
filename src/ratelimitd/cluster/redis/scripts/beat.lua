-- A sign of life of one node, and who else gave one.
--
-- KEYS[1]  when each incarnation of a node was last heard of, by its name
-- KEYS[2]  the fingerprint of the secret that keys the buckets' names: that of the first node
-- ARGV[1]  name of the incarnation
-- ARGV[2]  how long a sign of life is good for, in µs; 0: it leaves
-- ARGV[3]  fingerprint of its secret; empty: it does not know it yet
--
-- Returns the store's time in µs, the fingerprint that holds, and the names of those alive.
--
-- What somebody else put there is removed: it would keep nodes from finding each other, or from starting.

local KEPT_S = 86400

local now = call('TIME')
local now_us = now[1] * US_PER_S + now[2]
local ttl_us = tonumber(ARGV[2])
if is_of_another_type(pcall('ZRANGE', KEYS[1], 0, 0)) then
  call('EXPIRE', KEYS[1], 0)
end
local fingerprint = value_at(KEYS[2])
if fingerprint and (type(fingerprint) ~= 'string' or not string.find(fingerprint, '^%w+$')) then
  call('EXPIRE', KEYS[2], 0)
end

if ttl_us > 0 then
  call('ZADD', KEYS[1], string.format('%.0f', now_us), ARGV[1])
  call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now_us - ttl_us))
  -- From before the clock went back, as at a failover: who lives says so again.
  call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now_us + ttl_us), '+inf')
  call('EXPIRE', KEYS[1], KEPT_S)
  if ARGV[3] ~= '' then
    call('SET', KEYS[2], ARGV[3], 'NX')
  end
  call('EXPIRE', KEYS[2], KEPT_S)
else
  call('ZREM', KEYS[1], ARGV[1])
end
return { string.format('%.0f', now_us), call('GET', KEYS[2]) or '', call('ZRANGE', KEYS[1], 0, 999) }
