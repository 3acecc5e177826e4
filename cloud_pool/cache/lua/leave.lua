-- End the lease if no follower on another gateway waits, when no local client waits either.
-- ARGV[3..]: fence
-- Reply: 1 a follower waits, so the leader continues; 0 the lease has ended
if not holds(ARGV[3]) then return 0 end
if wanted() then return 1 end
close()
return 0
