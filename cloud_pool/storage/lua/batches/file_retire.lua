#!lua flags=allow-oom
-- Hide a file from its owner, before its content is deleted.
-- ARGV: now (unix ms), id, lease (ms)
-- Reply: 1 if the caller shall delete the content now; 0 if a batch still reads it, or there is no such file
local id = ARGV[2]
if redis.call('EXISTS', key('file', id)) == 0 then return 0 end
return retire_file(id, time_ms(ARGV[1]), ARGV[3]) and 1 or 0
