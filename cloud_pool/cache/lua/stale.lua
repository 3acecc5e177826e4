-- Read the answer if it is younger than ARGV[3] (ms).
-- Reply: {value, age in ms} | {}
local found = read(entry, 'at', 'value')
local age = tonumber(found[1]) and now - tonumber(found[1]) or -1
if found[2] and age >= 0 and age < tonumber(ARGV[3]) then return {found[2], integer(age)} end
return {}
