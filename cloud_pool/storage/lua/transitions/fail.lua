#!lua flags=allow-oom
-- Finish a job with an error.
-- ARGV: now (unix ms), id, fence, ttl (ms), error as JSON, error code, event (fail or expire),
--   bill of the run or ''
-- Reply: 1; 0 if the fence is outdated
local now, id, fence, ttl, error_json, code = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[8], now)
if not accepted then return reply end
redis.call('HSET', record, 'error', error_json, 'code', code)
transition(record, ARGV[7])
finish_job(id, record, now, ttl)
return 1
