#!lua flags=allow-oom
-- Renew a worker's leases of runs, and report those that it has lost, and the jobs whose events a client follows.
-- ARGV: lease (ms) to renew or 0 to check only, then job id, fence, ...
-- Reply: {ids of the jobs that are no longer this worker's, ids of the followed ones of the others}
local lease, lost, followed = ARGV[1], {}, {}
for i = 2, #ARGV, 2 do
  local record = key('job', ARGV[i])
  if holds_lease(record, ARGV[i + 1]) then
    if redis.call('EXISTS', key('followed', ARGV[i])) == 1 then table.insert(followed, ARGV[i]) end
    if lease ~= '0' then
      local f = redis.call('HMGET', record, 'tier', 'priority')
      redis.call('ZADD', leases(f[1], f[2]), lease_end(lease), ARGV[i])
    end
  else
    table.insert(lost, ARGV[i])
  end
end
return {lost, followed}
