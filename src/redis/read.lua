-- Reads the value and its watermark in one step. ARGV[2] is 'get' to read only, 'raise' to move the
-- watermark up first (S5, S6), or 'rebind' to bind the resource to the fence's lock as well.
local w, instead = fencelock_watermark(KEYS[1])
if not w then return instead end
local verdict = 'applied'
if ARGV[2] ~= 'get' then
  local next
  verdict, next = fencelock_judge(w, ARGV[1], ARGV[2])
  if verdict ~= 'applied' then return fencelock_words(verdict, w) end
  w = next
end

local value = redis.pcall('GET', KEYS[2])
if type(value) == 'table' and value.err then
  if string.find(value.err, 'WRONGTYPE', 1, true) then return {'corrupt', 'the value is not a string'} end
  return value
end
if ARGV[2] ~= 'get' then fencelock_store(KEYS[1], w) end
local words = fencelock_words(verdict, w)
-- False is nil in the answer, so it stands last.
words[#words + 1] = value
return words
