-- Answers that may be revised: a job has succeeded without parts that are still being read. Shared by all job scripts,
-- after endings.lua. A worker holds a lease of such a job in `late`, under a fence, as it held the job's run.

-- Whether the worker with this fence may still revise the answer.
local function holds_revision(record, fence)
  local f = redis.call('HMGET', record, 'state', 'fence', 'late')
  return f[1] == 'succeeded' and f[2] == fence and f[3]
end

-- Let the worker that reports go on with these kinds of part, under the next fence.
local function await_parts(id, record, kinds, lease)
  redis.call('HSET', record, 'late', kinds)
  redis.call('HINCRBY', record, 'fence', 1)
  redis.call('ZADD', key('late'), lease_end(lease), id)
end

-- No revision follows any more: the request goes.
local function end_revisions(id, record)
  redis.call('HDEL', record, 'late', 'body')
  redis.call('ZREM', key('late'), id)
end

-- Tell that no further revision follows, and why. `error` is JSON. The next fence makes its webhook another one's.
local function drop_revision(id, record, now, error)
  end_revisions(id, record)
  redis.call('HINCRBY', record, 'fence', 1)
  redis.call('HSET', record, 'late_error', error)
  publish_event(id, 'job.not_revised', error)
  queue_webhook(id, record, now, 'not_revised')
end
