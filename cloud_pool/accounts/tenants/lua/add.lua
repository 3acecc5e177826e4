-- Add amounts to the usage of a day. A repeated call, whose first reply was lost, changes nothing.
-- KEYS: usage of the day, mark of this batch of amounts
-- ARGV: retention (s), then field, amount, ...
-- Reply: 1; 0 if this batch was added before
if not redis.call('SET', KEYS[2], '1', 'NX', 'EX', 86400) then return 0 end
for i = 2, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[i], ARGV[i + 1]) end
redis.call('EXPIRE', KEYS[1], ARGV[1])
return 1
