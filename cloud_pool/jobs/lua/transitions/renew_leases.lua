#!lua flags=allow-oom
-- Renew a worker's leases, and report the runs that it has lost.
-- ARGV: consumer, 1 to renew or 0 to check only, then job id, fence, ...
-- Reply: ids of the jobs that are no longer this worker's
local consumer, renew, lost = ARGV[1], ARGV[2], {}
for i = 3, #ARGV, 2 do
  local record = key('job', ARGV[i])
  if not holds_lease(record, ARGV[i + 1]) then
    table.insert(lost, ARGV[i])
  elseif renew == '1' then
    local f = redis.call('HMGET', record, 'tier', 'priority', 'entry')
    redis.call('XCLAIM', queue(f[1], f[2]), 'workers', consumer, 0, f[3], 'JUSTID')
  end
end
return lost
