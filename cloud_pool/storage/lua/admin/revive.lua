#!lua flags=allow-oom
-- Return a dead letter to its queue, with all its attempts.
-- ARGV: now (unix ms), id, time until the new deadline (ms)
-- Reply: 1; 0 if the job is no dead letter or a batch has counted it
local now, id = time_ms(ARGV[1]), ARGV[2]
local deadline = after(now, ARGV[3])
local record = key('job', id)
local f = redis.call('HMGET', record, 'owner', 'dead_letter', 'batch', 'idempotency')
if f[3] and f[3] ~= '' then return 0 end  -- the batch has counted it as failed
if not transition(record, 'revive') then return 0 end
uncount_ended(tenant_of(f[1]), id, record)
redis.call('PERSIST', record)
redis.call('PERSIST', key('events', id))
if f[4] and f[4] ~= '' then redis.call('PERSIST', f[4]) end
redis.call('XDEL', key('dead'), f[2])
redis.call('HSET', record, 'attempts', 0, 'deadline', deadline, 'dead_letter', '')
redis.call('HDEL', record, 'finished', 'error', 'code', 'kept')
count_open(tenant_of(f[1]), id, record, now)
redis.call('ZADD', key('deadlines'), deadline, id)
enqueue(id, record, now)
publish_event(id, 'queued')
return 1
