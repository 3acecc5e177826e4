#!lua flags=allow-oom
-- Schedule the next attempt, or move the job to the dead letters when its attempts are used up.
-- ARGV: now (unix ms), id, fence, delay (ms), 1 if this run counts as an attempt, error as JSON, error code,
--   dead letter ttl (ms), max dead letters, 1 if the tenant is over a limit: the job returns to its queue, and no job of
--   the tenant starts before the delay is over, bill of the run or ''
-- Reply: 0 if the fence is outdated, 1 postponed, 2 dead
local now, id, fence, delay, counts = time_ms(ARGV[1]), ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local error_json, code, dead_ttl, max_dead = ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local record = key('job', id)
local accepted, reply = accept_report(record, fence, ARGV[11], now)
if not accepted then return reply end
redis.call('HSET', record, 'error', error_json, 'code', code)
if counts == '0' then
  redis.call('HINCRBY', record, 'attempts', -1)
  redis.call('HINCRBY', record, 'postponed', 1)
end
local f = redis.call('HMGET', record, 'attempts', 'max_attempts', 'owner')
if tonumber(f[1]) >= tonumber(f[2]) then
  dead_letter(id, record, now, dead_ttl, max_dead)
  return 2
end
leave_queue(id, record)
if ARGV[10] == '1' then
  transition(record, 'release')
  block(tenant_of(f[3]), now, delay)
  enqueue(id, record, now)
  publish_instead_of({'running', 'queued'}, id, 'queued', error_json)
  return 1
end
transition(record, 'postpone')
redis.call('ZADD', key('waiting'), after(now, delay), id)
if counts == '0' then publish_instead_of({'running', 'queued', 'waiting'}, id, 'waiting', error_json)
else publish_event(id, 'waiting', error_json) end
return 1
