#!lua flags=allow-oom
-- Remove the record of a file whose content is deleted, and give its bytes back.
-- ARGV: id
-- Reply: 1; 0 if it is gone already
local id = ARGV[1]
local f = redis.call('HMGET', key('file', id), 'owner', 'store')
if not f[1] then return 0 end
charge(id, tenant_of(f[1]), f[2], 0)
redis.call('ZREM', key('file_bytes', tenant_of(f[1])), id)
redis.call('ZREM', key('file_due'), id)
redis.call('DEL', key('file', id), key('file', id, 'parts'))
return 1
