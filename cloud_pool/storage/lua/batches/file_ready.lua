#!lua flags=allow-oom
-- Publish an uploaded file whose parts are all written. The caller may repeat the call.
-- ARGV: now (unix ms), id, ttl (ms), file name, purpose, bytes, tags, then name:bytes of each part
-- Reply: 1; 0 if its writer was taken for dead
local now, id, ttl = time_ms(ARGV[1]), ARGV[2], ARGV[3]
local file = key('file', id)
local f = redis.call('HMGET', file, 'state', 'owner', 'store')
if f[1] == 'ready' then return 1 end
if f[1] ~= 'writing' then return 0 end
redis.call('HSET', file, 'filename', ARGV[4], 'purpose', ARGV[5], 'bytes', ARGV[6], 'tags', ARGV[7])
for i = 8, #ARGV do redis.call('RPUSH', key('file', id, 'parts'), ARGV[i]) end
charge(id, tenant_of(f[2]), f[3], ARGV[6])
publish_file(id, now, ttl)
return 1
