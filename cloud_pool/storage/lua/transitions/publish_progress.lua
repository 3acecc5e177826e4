#!lua flags=allow-oom
-- Append a progress event of a running job.
-- ARGV: id, fence, progress as JSON
-- Reply: 1; 0 if the fence is outdated
if not holds_lease(key('job', ARGV[1]), ARGV[2]) then return 0 end
publish_instead_of({'progress'}, ARGV[1], 'progress', ARGV[3])
return 1
