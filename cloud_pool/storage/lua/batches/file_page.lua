#!lua flags=allow-oom
-- List the files of an owner, newest first.
-- ARGV: now (unix ms), owner, id after which the page begins or '', limit, purpose or ''
-- Reply: files as HGETALL
local now, owner, after_id, limit, purpose = tonumber(time_ms(ARGV[1])), ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local listed, rows = key('files', owner), {}
local start = (redis.call('ZREVRANK', listed, after_id) or -1) + 1
while #rows < limit do
  local names = redis.call('ZREVRANGE', listed, start, start + limit - 1)
  for _, name in ipairs(names) do
    local f = redis.call('HMGET', key('file', name), 'state', 'expires', 'purpose')
    -- An upload that names its time is over at that time; the file of a batch, when its content is deleted.
    local is_over = string.sub(f[3] or '', 1, 5) ~= 'batch' and tonumber(f[2] or 0) <= now
    if f[1] == 'ready' and not is_over and (purpose == '' or f[3] == purpose) and #rows < limit then
      table.insert(rows, redis.call('HGETALL', key('file', name)))
    end
  end
  if #names < limit then break end
  start = start + limit
end
return rows
