#!lua flags=allow-oom
-- Read the outcomes of lines up to the first one that has not ended, or until there are enough bytes.
-- ARGV: bytes that are enough, job id of each line
-- Reply: {custom_id, state, error, result} per line, with '' for what does not exist
local enough, rows, bytes = tonumber(ARGV[1]), {}, 0
for i = 2, #ARGV do
  local f = redis.call('HMGET', key('job', ARGV[i]), 'custom_id', 'state', 'error', 'finished')
  if (f[2] and not f[4]) or bytes >= enough then break end
  local result = redis.call('GET', key('result', ARGV[i])) or ''
  bytes = bytes + #result
  table.insert(rows, {f[1] or '', f[2] or '', f[3] or '', result})
end
return rows
