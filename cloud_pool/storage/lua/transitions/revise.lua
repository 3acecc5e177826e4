#!lua flags=allow-oom
-- Replace the answer of a job by one that was made with late parts.
-- ARGV: now (unix ms), id, fence, ttl (ms), result, outcome of the shared cache or '', bill of the run or '', kinds of
--   part, separated by commas, that may still revise it or '', lease of that (ms)
-- Reply: 1; 0 if the fence is outdated
local now, id, fence, ttl, result, cache = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local left, lease = ARGV[8], ARGV[9]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[7], now, holds_revision)
if not accepted then return reply end
transition(record, 'revise')
local revision = redis.call('HINCRBY', record, 'revision', 1)
redis.call('HSET', record, 'cache', cache)
redis.call('SET', key('result', id), result, 'PX', keep_for(id, record, ttl))
publish_event(id, 'job.revised', cjson.encode({event = 'job.revised', revision = revision}))
queue_webhook(id, record, now, 'revised')
if left ~= '' then await_parts(id, record, left, lease) else end_revisions(id, record) end
return 1
