#!lua flags=allow-oom
-- Cancel a job. Later reports of its worker have no effect.
-- ARGV: now (unix ms), id, owner, ttl (ms)
-- Reply: absent | cancelled | ended
local now, id, owner, ttl = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4]
local record = key('job', id)
if redis.call('HGET', record, 'owner') ~= owner then return 'absent' end
if redis.call('HGET', record, 'state') == 'cancelled' then return 'cancelled' end
if not transition(record, 'cancel') then return 'ended' end
finish_job(id, record, now, ttl)
return 'cancelled'
