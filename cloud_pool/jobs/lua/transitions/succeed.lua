#!lua flags=allow-oom
-- Store a result and finish the job.
-- ARGV: now (unix ms), id, fence, ttl (ms), result, outcome of the shared cache or ''
-- Reply: 1; 0 if the fence is outdated
local now, id, fence, ttl, result, cache = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = key('job', id)
if not holds_lease(record, fence) then
  -- A repeated call, whose first reply was lost, succeeds.
  local f = redis.call('HMGET', record, 'state', 'fence')
  return f[1] == 'succeeded' and f[2] == fence and 1 or 0
end
transition(record, 'succeed')
redis.call('SET', key('result', id), result, 'PX', redis.call('HGET', record, 'ttl') or ttl)
redis.call('HDEL', record, 'error', 'code')
if cache ~= '' then redis.call('HSET', record, 'cache', cache) end
finish_job(id, record, now, ttl)
return 1
