#!lua flags=allow-oom
-- Store a result and finish the job.
-- ARGV: now (unix ms), id, fence, ttl (ms), result, outcome of the shared cache or '', bill of the run or '', kinds of
--   part, separated by commas, that may revise the answer or '', lease of that (ms), error of an answer that is not
--   revised, as JSON, or ''
-- Reply: 1; 0 if the fence is outdated
local now, id, fence, ttl, result, cache = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local late, lease, late_error = ARGV[8], ARGV[9], ARGV[10]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[7], now)
if not accepted then return reply end
transition(record, 'succeed')
redis.call('SET', key('result', id), result, 'PX', redis.call('HGET', record, 'ttl') or ttl)
redis.call('HDEL', record, 'error', 'code')
if cache ~= '' then redis.call('HSET', record, 'cache', cache) end
if late ~= '' then
  local f = redis.call('HMGET', record, 'started', 'revise', 'deadline')
  redis.call('HSET', record, 'late', late, 'late_until', string.format('%.0f', math.min(f[1] + f[2], tonumber(f[3]))))
end
finish_job(id, record, now, ttl)
if late ~= '' then await_parts(id, record, late, lease) end
if late_error ~= '' then drop_revision(id, record, now, late_error) end
return 1
