#!lua flags=allow-oom
-- Move a claimed job whose record the worker cannot read to the dead letters.
-- ARGV: now (unix ms), id, ttl (ms), max dead letters
-- Reply: 1
quarantine(ARGV[2], key('job', ARGV[2]), time_ms(ARGV[1]), ARGV[3], ARGV[4])
return 1
