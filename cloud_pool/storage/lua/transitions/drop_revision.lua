#!lua flags=allow-oom
-- End what may revise an answer: it stays as it is.
-- ARGV: now (unix ms), id, fence, error as JSON, bill of a run that failed or ''
-- Reply: 1; 0 if the fence is outdated
local now, id, fence = time_ms(ARGV[1]), ARGV[2], ARGV[3]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[5], now, holds_revision)
if not accepted then return reply end
drop_revision(id, record, now, ARGV[4])
return 1
