-- Records the heartbeat of one node, and returns the nodes alive.
--
-- KEYS[1]  sorted set: time of the last heartbeat by incarnation
-- KEYS[2]  fingerprint of the secret that keys the buckets' names, that of the nodes alive
-- ARGV[1]  name of the incarnation
-- ARGV[2]  lifetime of the heartbeat in µs; 0: the node leaves
-- ARGV[3]  fingerprint of the node's secret; empty while unknown
--
-- Returns the store's time in µs, the fingerprint in KEYS[2], and the names of the incarnations alive.
--
-- Foreign values are removed: they would keep nodes from finding each other, or from starting.

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
  -- Set before the clock went back, as in a failover; nodes alive send another heartbeat.
  call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now_us + ttl_us), '+inf')
  call('EXPIRE', KEYS[1], KEPT_S)
  if ARGV[3] ~= '' then
    -- A node alone may have another secret than those before it: the rule database was replaced, or the secret changed.
    if call('ZRANGE', KEYS[1], 1, 1)[1] then
      call('SET', KEYS[2], ARGV[3], 'NX')
    else
      call('SET', KEYS[2], ARGV[3])
    end
  end
  call('EXPIRE', KEYS[2], KEPT_S)
else
  call('ZREM', KEYS[1], ARGV[1])
end
return { string.format('%.0f', now_us), call('GET', KEYS[2]) or '', call('ZRANGE', KEYS[1], 0, 999) }
