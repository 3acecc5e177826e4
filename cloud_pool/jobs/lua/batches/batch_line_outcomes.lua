#!lua flags=allow-oom
-- Read the outcomes of lines.
-- ARGV: batch id, number of the first line (from 1), job id of each line
-- Reply: {custom_id, state, error, result} per line, with '' for what does not exist
local custom_ids, first, rows = key('batch', ARGV[1], 'custom_ids'), tonumber(ARGV[2]), {}
local names = redis.call('LRANGE', custom_ids, first - 1, first + #ARGV - 4)
for i = 3, #ARGV do
  local f = redis.call('HMGET', key('job', ARGV[i]), 'state', 'error')
  local result = redis.call('GET', key('result', ARGV[i]))
  table.insert(rows, {names[i - 2] or '', f[1] or '', f[2] or '', result or ''})
end
return rows
