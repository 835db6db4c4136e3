-- Replaces the value, or removes it: ARGV[2] is 'put' or 'delete', ARGV[3] the bytes.
local w, instead = fencelock_watermark(KEYS[1])
if not w then return instead end
local verdict, next = fencelock_judge(w, ARGV[1], 'write')
if verdict ~= 'applied' and verdict ~= 'repeated' then return fencelock_words(verdict, w) end

-- What is freed comes first: at the memory limit a server refuses what may need memory.
if verdict == 'applied' and ARGV[2] == 'delete' then redis.call('DEL', KEYS[2]) end
fencelock_store(KEYS[1], next)
if verdict == 'applied' then
  if ARGV[2] == 'put' then redis.call('SET', KEYS[2], ARGV[3]) end
  redis.call('HSET', KEYS[1], 'writer', ARGV[2] == 'put' and next.token or '')
end
return fencelock_words(verdict, next)
