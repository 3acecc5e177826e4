#!lua flags=allow-oom
-- Delete a dead letter with its record, events and idempotency key. A line of a batch loses its request only: its error
-- belongs to the batch's error file.
-- ARGV: id
-- Reply: 1; 0 if the job is no dead letter
local id = ARGV[1]
local f = redis.call('HMGET', key('job', id), 'state', 'dead_letter', 'owner', 'batch')
if f[1] ~= 'dead' or not f[2] or f[2] == '' then return 0 end
if f[4] and f[4] ~= '' then
  redis.call('XDEL', key('dead'), f[2])
  redis.call('HDEL', key('job', id), 'body', 'dead_letter')
  return 1
end
uncount_ended(tenant_of(f[3]), id, key('job', id))
forget_job(id, key('job', id))
return 1
