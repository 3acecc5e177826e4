#!lua flags=allow-oom
-- Erase a job in any state: it leaves its queue, its run loses its lease, and nothing of it stays. No webhook is sent.
-- ARGV: id
-- Reply: 1; 0 if it is gone
local id = ARGV[1]
local record = key('job', id)
local f = redis.call('HMGET', record, 'owner', 'idempotency', 'dead_letter')
if not f[1] then return 0 end
leave_queue(id, record)
redis.call('ZREM', key('waiting'), id)
redis.call('ZREM', key('deadlines'), id)
redis.call('ZREM', key('late'), id)
count_closed(tenant_of(f[1]), id, record)
redis.call('ZREM', key('jobs', f[1]), id)
if f[3] and f[3] ~= '' then redis.call('XDEL', key('dead'), f[3]) end
if f[2] and f[2] ~= '' then redis.call('UNLINK', f[2]) end
redis.call('UNLINK', record, key('result', id), key('events', id), key('text', id), key('followed', id))
return 1
