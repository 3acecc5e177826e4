#!lua
-- Accept a job, unless its idempotency key is known, its batch has ended, or its queue or owner has too many jobs.
-- The caller may repeat the call.
-- ARGV: now, id, owner, tier, priority, deadline (unix ms), idempotency key or '', body digest, max queued,
--   max unfinished, age of the oldest entry to keep in the owner's list (ms), then field, value, ... of the record
-- Reply: {accepted | known | conflict | batch_over | queue_full | owner_full, job id or ''}
local now, id, owner, tier, priority = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local deadline, idempotency_key, digest = ARGV[6], ARGV[7], ARGV[8]
local max_queued, max_unfinished = tonumber(ARGV[9]), tonumber(ARGV[10])
local record = key('job', id)
if redis.call('EXISTS', record) == 1 then return {'accepted', id} end  -- a repeated call
local lock = idempotency_key ~= '' and key('idempotency', owner, idempotency_key) or ''
if lock ~= '' then
  local known = redis.call('HMGET', lock, 'id', 'digest')
  if known[1] then return {known[2] == digest and 'known' or 'conflict', known[1]} end
end
local batch = ''
for i = 12, #ARGV, 2 do if ARGV[i] == 'batch' then batch = ARGV[i + 1] end end
if batch ~= '' and redis.call('HGET', key('batch', batch), 'state') ~= 'in_progress' then return {'batch_over', ''} end
if redis.call('XLEN', queue(tier, priority)) >= max_queued then return {'queue_full', ''} end
if redis.call('ZCARD', key('open', owner)) >= max_unfinished then return {'owner_full', ''} end
redis.call('HSET', record, 'id', id, 'owner', owner, 'tier', tier, 'priority', priority, 'deadline', deadline,
  'idempotency', lock, 'state', 'queued', 'created', now, 'attempts', 0, 'postponed', 0, 'fence', 0)
for i = 12, #ARGV, 2 do redis.call('HSET', record, ARGV[i], ARGV[i + 1]) end
redis.call('ZADD', key('open', owner), now, id)
if batch == '' then
  redis.call('ZREMRANGEBYSCORE', key('jobs', owner), '-inf', after(now, -ARGV[11]))
  redis.call('ZADD', key('jobs', owner), now, id)
end
redis.call('ZADD', key('deadlines'), deadline, id)
redis.call('SADD', key('tiers'), tier)
if lock ~= '' then redis.call('HSET', lock, 'id', id, 'digest', digest) end
enqueue(id, record)
publish_event(id, 'queued')
return {'accepted', id}
