#!lua
-- Append the newest text of running jobs, for clients that follow their events. The id of an entry is the run's fence
-- and the characters that the run has with it; text of earlier runs is void and goes.
-- ARGV: ttl (ms), then of each job: id, fence, characters before, characters after, text
-- Reply: how many characters of each run are stored: other than asked where Redis has lost some; -1 if the fence is
--   outdated
local ttl, replies = ARGV[1], {}
for i = 2, #ARGV, 5 do
  local id, fence, from, to = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local text, stored = key('text', id), '0'
  if holds_lease(key('job', id), fence) then
    local last = redis.call('XREVRANGE', text, '+', '-', 'COUNT', 1)[1]
    local run, characters = string.match(last and last[1] or '', '^(%d+)-(%d+)$')
    if run == fence then stored = characters end
    if stored == from then
      redis.call('XADD', text, 'MINID', fence .. '-0', fence .. '-' .. to, 'from', from, 'text', ARGV[i + 4])
      stored = to
    end
    redis.call('PEXPIRE', text, ttl)
  else
    stored = '-1'
  end
  table.insert(replies, stored)
end
return replies
