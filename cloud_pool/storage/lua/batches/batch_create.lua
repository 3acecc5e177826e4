#!lua
-- Create a batch, which reads its input file until it ends. The caller may repeat the call.
-- `tenant_batches:<tenant>` holds batches by the time when they stop to count: open ones never do.
-- ARGV: now (unix ms), id, owner, file, request digest, completion window (ms), ttl of ended batches (ms), max open
--   batches, max batches, max files of the tenant, then field, value, ... of the record
-- Reply: created | known | conflict (the id exists with another digest) | absent (no such input file of this owner)
--   | open | batches | files (the tenant has too many of these)
local now, id, owner, file, digest = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local window, ttl = ARGV[6], ARGV[7]
local max_open, max_batches, max_files = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local batch, tenant = key('batch', id), tenant_of(owner)
local known = redis.call('HGET', batch, 'digest')
if known then return is_same_request(known, digest) and 'known' or 'conflict' end
local f = redis.call('HMGET', key('file', file), 'owner', 'purpose', 'state', 'expires')
if f[1] ~= owner or f[2] ~= 'batch' or f[3] ~= 'ready' or tonumber(f[4]) <= tonumber(now) then return 'absent' end
local counted = key('tenant_batches', tenant)
redis.call('ZREMRANGEBYSCORE', counted, '-inf', now)
if redis.call('ZCOUNT', counted, '+inf', '+inf') >= max_open then return 'open' end
if redis.call('ZCARD', counted) >= max_batches then return 'batches' end
if usage(tenant) + 2 > max_files then return 'files' end  -- its output and its errors
redis.call('HINCRBY', key('file', file), 'users', 1)
redis.call('HSET', batch, 'id', id, 'owner', owner, 'input', file, 'digest', digest, 'created', now, 'expires', after(now, window),
  'state', 'validating', 'total', 0, 'submitted', 0, 'offset', 0, 'collected', 0, 'ended', 0, 'completed', 0, 'failed', 0)
for i = 11, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', counted, '+inf', id)
redis.call('ZREMRANGEBYSCORE', key('batches', owner), '-inf', after(now, -2 * window - ttl))
redis.call('ZADD', key('batches', owner), now, id)
for _, list in ipairs({counted, key('batches', owner)}) do redis.call('PEXPIRE', list, after(2 * window, ttl)) end
redis.call('ZADD', key('batches'), now, id)
return 'created'
