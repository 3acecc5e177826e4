#!lua flags=allow-oom
-- Store a result and finish the job.
-- ARGV: now (unix ms), id, fence, ttl (ms), result, outcome of the shared cache or '', bill of the run or ''
-- Reply: 1; 0 if the fence is outdated
local now, id, fence, ttl, result, cache = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[7], now)
if not accepted then return reply end
transition(record, 'succeed')
redis.call('SET', key('result', id), result, 'PX', redis.call('HGET', record, 'ttl') or ttl)
redis.call('HDEL', record, 'error', 'code')
if cache ~= '' then redis.call('HSET', record, 'cache', cache) end
finish_job(id, record, now, ttl)
return 1
