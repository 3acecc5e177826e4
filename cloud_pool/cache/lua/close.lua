-- End the lease without an answer.
-- ARGV[3..]: fence
-- Reply: 1; 0 if the lease is lost
if not holds(ARGV[3]) then return 0 end
if wanted() then append(ARGV[3], 'failed', '') end
close()
return 1
