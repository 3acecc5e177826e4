#!lua flags=allow-oom
-- Erase a job in any state: it leaves its queue, its run loses its lease, and nothing of it stays. No webhook is sent.
-- ARGV: id
-- Reply: 1; 0 if it is gone
local id = ARGV[1]
local record = key('job', id)
local owner = redis.call('HGET', record, 'owner')
if not owner then return 0 end
leave_queue(id, record)
redis.call('ZREM', key('waiting'), id)
redis.call('ZREM', key('deadlines'), id)
count_closed(tenant_of(owner), id, record)
uncount_ended(tenant_of(owner), id, record)
forget_job(id, record)
return 1
