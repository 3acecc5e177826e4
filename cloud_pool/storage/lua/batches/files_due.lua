#!lua flags=allow-oom
-- Claim files whose content shall be deleted: expired ones, deleted ones, and those whose writer died.
-- ARGV: now (unix ms), lease (ms), limit
-- Reply: {id, store} of each
local now, lease, rows = time_ms(ARGV[1]), ARGV[2], {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', key('file_due'), '-inf', now, 'LIMIT', 0, ARGV[3])) do
  local store = redis.call('HGET', key('file', id), 'store')
  if not store then redis.call('ZREM', key('file_due'), id)
  elseif retire_file(id, now, lease) then table.insert(rows, {id, store}) end
end
return rows
