-- Delete the entry if it still holds the value ARGV[3], which could not be decoded.
-- Reply: 1; 0 if it holds another
if read(entry, 'value')[1] == ARGV[3] then return redis.call('DEL', entry) end
return 0
