#!lua
-- Create a batch with a copy of its input file. The caller may repeat the call.
-- ARGV: now (unix ms), id, owner, file, request digest, completion window (ms), then field, value, ... of the record
-- Reply: created | known | conflict (the id exists with another digest) | absent (no such input file of this owner)
local now, id, owner, file, digest = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local batch = key('batch', id)
local known = redis.call('HGET', batch, 'digest')
if known then return known == digest and 'known' or 'conflict' end
local f = redis.call('HMGET', key('file', file), 'owner', 'purpose')
if f[1] ~= owner or f[2] ~= 'batch' then return 'absent' end
redis.call('COPY', key('file', file, 'parts'), key('batch', id, 'parts'))
redis.call('PERSIST', key('batch', id, 'parts'))
redis.call('HSET', batch, 'id', id, 'owner', owner, 'input', file, 'digest', digest, 'created', now, 'expires', after(now, ARGV[6]),
  'state', 'validating', 'total', 0, 'submitted', 0, 'ended', 0, 'completed', 0, 'failed', 0)
for i = 7, #ARGV, 2 do redis.call('HSET', batch, ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', key('batches', owner), now, id)
redis.call('ZADD', key('batches'), now, id)
return 'created'
