#!lua
-- Accept a job, unless its idempotency key is known, its batch has ended, or its queue or tenant has too many jobs. Of a
-- batch only the line after the last submitted one is accepted, and the batch advances with it: two workers that expand
-- the same batch neither lose nor repeat a line. The caller may repeat the call.
-- ARGV: now, id, owner, tier, priority, deadline (unix ms), idempotency key or '', body digest, max queued jobs of the
--   tier and priority, of which each tenant may have so many in any case, max unfinished jobs of the tenant, max bytes
--   of their requests, bytes of this one, age of the oldest entry to keep in the owner's list (ms), most ended jobs of the
--   tenant and their bytes, then field, value, ... of the record
-- Reply: {accepted | known | conflict | batch_over | queue_full | tenant_full | tenant_bytes, job id or ''}
local FIELDS = 17
local now, id, owner, tier, priority = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local deadline, idempotency_key, digest = ARGV[6], ARGV[7], ARGV[8]
local max_queued, reserved, max_unfinished = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11])
local max_bytes, bytes, max_age = tonumber(ARGV[12]), tonumber(ARGV[13]), ARGV[14]
local max_ended, max_ended_bytes = tonumber(ARGV[15]), tonumber(ARGV[16])
local record, tenant = key('job', id), tenant_of(owner)
if redis.call('EXISTS', record) == 1 then return {'accepted', id} end  -- a repeated call
local lock = idempotency_key ~= '' and key('idempotency', owner, idempotency_key) or ''
if lock ~= '' then
  local known = redis.call('HMGET', lock, 'id', 'digest')
  if known[1] then return {is_same_request(known[2], digest) and 'known' or 'conflict', known[1]} end
end
local batch, line, offset, not_before = '', 0, 0, 0
for i = FIELDS, #ARGV, 2 do
  if ARGV[i] == 'batch' then batch = ARGV[i + 1]
  elseif ARGV[i] == 'line' then line = tonumber(ARGV[i + 1])
  elseif ARGV[i] == 'offset' then offset = ARGV[i + 1]
  elseif ARGV[i] == 'not_before' then not_before = tonumber(ARGV[i + 1]) end
end
if batch ~= '' then
  local f = redis.call('HMGET', key('batch', batch), 'state', 'submitted')
  if f[1] and tonumber(f[2]) >= line then return {'accepted', id} end  -- a repeated call: the job may be collected
  if f[1] ~= 'in_progress' or tonumber(f[2]) ~= line - 1 then return {'batch_over', ''} end
end
if redis.call('ZCARD', key('open', tenant)) >= max_unfinished then return {'tenant_full', ''} end
if (redis.call('HGET', key('open_bytes'), tenant) or 0) + bytes > max_bytes then return {'tenant_bytes', ''} end
if tonumber(redis.call('HGET', queue(tier, priority), 'queued') or 0) >= max_queued
  and redis.call('ZCARD', queue_of(tenant, tier, priority)) >= reserved then return {'queue_full', ''} end
if batch == '' then trim_ended(tenant, now, max_ended, max_ended_bytes) end
local waits = not_before > tonumber(now)
redis.call('HSET', record, 'id', id, 'owner', owner, 'tier', tier, 'priority', priority, 'deadline', deadline,
  'idempotency', lock, 'state', waits and 'waiting' or 'queued', 'created', now, 'attempts', 0, 'postponed', 0, 'fence', 0, 'bytes', bytes,
  'number', redis.call('INCR', key('accepted')))
for i = FIELDS, #ARGV, 2 do redis.call('HSET', record, ARGV[i], ARGV[i + 1]) end
count_open(tenant, id, record, now)
if batch == '' then
  redis.call('ZREMRANGEBYSCORE', key('jobs', owner), '-inf', after(now, -max_age))
  redis.call('ZADD', key('jobs', owner), now, id)
  redis.call('PEXPIRE', key('jobs', owner), max_age)
end
redis.call('ZADD', key('deadlines'), deadline, id)
redis.call('SADD', key('tiers'), tier)
if batch ~= '' then redis.call('HSET', key('batch', batch), 'submitted', line, 'offset', offset) end
if lock ~= '' then redis.call('HSET', lock, 'id', id, 'digest', digest) end
if waits then redis.call('ZADD', key('waiting'), not_before, id) else enqueue(id, record, now) end
publish_event(id, waits and 'waiting' or 'queued')
return {'accepted', id}
