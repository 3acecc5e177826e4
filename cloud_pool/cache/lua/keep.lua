-- End the lease with an answer.
-- ARGV[3..]: fence, value ('': do not store it), how long to keep it (ms), chunks that are not published yet ('' if the
--   leader knows of no follower), marks of the subjects to which it belongs
-- Reply: 1; 0 if the lease is lost
if not holds(ARGV[3]) then return 0 end
if ARGV[4] ~= '' then
  redis.call('DEL', entry)
  redis.call('HSET', entry, 'at', integer(now), 'value', ARGV[4], 'of', ARGV[7])
  redis.call('PEXPIRE', entry, ARGV[5])
end
if wanted() then append(ARGV[3], ARGV[6] ~= '' and 'end' or 'wake', ARGV[6]) end
close()
return 1
