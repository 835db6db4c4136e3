-- Gives a grant up, and wakes whoever waits. With a linger time it keeps others out for that long
-- and is nobody's: a renewal that was on its way does not prolong it. Writes nothing that needs
-- memory first, so that a full server can still be freed.

local id, token, linger_us, retain_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local record, instead = read()
if not record then return instead end
local mine = held_by(record, id, token)
if not mine then return {'not_held'} end

redis.call('HDEL', KEYS[1], mine.field)
mine.expires, mine.state = now + linger_us, '0'
if linger_us > 0 then store(mine) end
redis.call('HSET', KEYS[1], 'idle', text(mine.expires))
keep(record, retain_ms)
tell()
return {'released'}
