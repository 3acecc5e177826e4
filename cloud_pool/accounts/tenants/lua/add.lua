-- Add amounts to the usage of a day and give back the reservations of the requests that they are of. A repeated call,
-- whose first reply was lost, changes nothing.
-- KEYS: usage of the day, mark of this batch of amounts, reservations, their ends
-- ARGV: retention (s), number of reservations, each as <id>.<fence>, then field, amount, ...
-- Reply: 1; 0 if this batch was added before
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', 86400) then return 0 end
local count = tonumber(ARGV[2])
for i = 3, 2 + count do
  local id, fence = string.match(ARGV[i], '^(.+)%.(%d+)$')
  release(KEYS[3], KEYS[4], id, fence)
end
for i = 3 + count, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
