#!lua flags=allow-oom
-- Check whether a URL is disabled, after it answered 410 Gone.
-- ARGV: owner, URL
-- Reply: 1 or 0
return redis.call('EXISTS', disabled_key(ARGV[1], ARGV[2]))
