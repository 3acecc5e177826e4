-- Append chunks to the stream and renew the lease.
-- ARGV[3..]: fence, lease (ms), chunks
-- Reply: as renew
if not holds(ARGV[3]) then return -1 end
renew(ARGV[3], tonumber(ARGV[4]))
append(ARGV[3], 'chunks', ARGV[5])
return wanted() and 1 or 0
