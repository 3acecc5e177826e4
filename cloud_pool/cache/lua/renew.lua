-- Renew the lease.
-- ARGV[3..]: fence, lease (ms)
-- Reply: -1 lost, 1 a follower on another gateway waits, 0 none does
if not holds(ARGV[3]) then return -1 end
renew(ARGV[3], tonumber(ARGV[4]))
return wanted() and 1 or 0
