-- Makes the next token larger than a floor; grants stay as they are. With 'mend', a damaged record
-- is written anew without holders, above whatever of its last token can still be read.

local floor, name, mend, ceiling, retain_ms = ARGV[1], ARGV[2], ARGV[3] == 'mend', tonumber(ARGV[4]), ARGV[5]

local record, instead = read()
local damaged = instead and instead[1] == 'corrupt'
if damaged and mend then
  record = {exists = false, holders = {}, last = number(redis.pcall('HGET', KEYS[1], 'last'))}
elseif not record then
  return instead
end
if too_far(floor, record.last) then return {'far', text(record.last or 0), text(limit(record.last))} end
if tonumber(floor) > ceiling then return {'exhausted', text(record.last or 0)} end

record.last = math.max(record.last or 0, tonumber(floor))
if damaged then redis.call('DEL', KEYS[1]) end
redis.call('HSET', KEYS[1], 'last', text(record.last), 'name', name)
if not record.exists then redis.call('HSET', KEYS[1], 'idle', text(now)) end
keep(record, retain_ms)
if damaged then tell() end
return {'raised', text(record.last)}
