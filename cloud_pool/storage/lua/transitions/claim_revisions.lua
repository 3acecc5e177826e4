#!lua flags=allow-oom
-- Claim answers that wait for late parts and whose worker is lost. One whose time is over, or that was claimed too
-- often, ends here.
-- ARGV: now (unix ms), lease (ms), how many to claim, how often one may be claimed, error of one whose time is over,
--   error of one that was claimed too often (both as JSON), then the tiers that the worker has
-- Reply: {records as HGETALL, each followed by the time that is left (ms), how many are too late, how many were lost}
local now, lease, limit, most_claims = time_ms(ARGV[1]), ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local rows, too_late, lost, tiers = {}, 0, 0, {}
for i = 7, #ARGV do tiers[ARGV[i]] = true end
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('late'), '-inf', lease_end(0), 'LIMIT', 0, 200)) do
  local record = key('job', id)
  local f = redis.call('HMGET', record, 'late', 'late_until', 'tier', 'claims')
  local left = (tonumber(f[2]) or 0) - tonumber(now)
  if not f[1] then
    redis.call('ZREM', key('late'), id)  -- the record has expired
  elseif left <= 0 then
    drop_revision(id, record, now, ARGV[5])
    too_late = too_late + 1
  elseif tonumber(f[4] or 0) >= most_claims then
    drop_revision(id, record, now, ARGV[6])
    lost = lost + 1
  elseif tiers[f[3]] and #rows < 2 * limit then
    redis.call('HINCRBY', record, 'fence', 1)
    redis.call('HINCRBY', record, 'claims', 1)
    redis.call('ZADD', key('late'), lease_end(lease), id)
    table.insert(rows, redis.call('HGETALL', record))
    table.insert(rows, left)
  end
end
return {rows, too_late, lost}
