#!lua flags=allow-oom
-- Delete a dead letter with its record, events and idempotency key.
-- ARGV: id
-- Reply: 1; 0 if the job is no dead letter
local id = ARGV[1]
local f = redis.call('HMGET', key('job', id), 'state', 'dead_letter', 'owner', 'idempotency')
if f[1] ~= 'dead' then return 0 end
redis.call('XDEL', key('dead'), f[2])
redis.call('ZREM', key('jobs', f[3]), id)
redis.call('DEL', key('job', id), key('events', id), key('result', id))
if f[4] and f[4] ~= '' then redis.call('DEL', f[4]) end
return 1
