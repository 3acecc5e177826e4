#!lua flags=allow-oom
-- Delete a place, or one turn of it. ARGV: owner or '' for any, place, name
-- Reply: 1; 0 if it is not there, or another owner's
local record = key('response', ARGV[2])
local owner = redis.call('HGET', record, 'owner')
if not owner or (ARGV[1] ~= '' and owner ~= ARGV[1]) then return 0 end
local tenant = tenant_of(owner)
if ARGV[2] == ARGV[3] then return forget_response(tenant, ARGV[2]) end
local old = redis.call('HGET', record, 't:' .. ARGV[3])
if not old then return 0 end
redis.call('HDEL', record, 't:' .. ARGV[3])
redis.call('HINCRBY', record, 'bytes', 8 - #old)
redis.call('HINCRBY', key('response_bytes', tenant), ARGV[2], 8 - #old)
redis.call('HINCRBY', key('response_bytes', tenant), '', 8 - #old)
return 1
