#!lua
-- Store the custom_id of every line.
-- ARGV: batch id, custom_id, ...
-- Reply: 1
local custom_ids = key('batch', ARGV[1], 'custom_ids')
redis.call('DEL', custom_ids)
for i = 2, #ARGV do redis.call('RPUSH', custom_ids, ARGV[i]) end
return 1
