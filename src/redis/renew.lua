-- Extends a grant that is still good and still its holder's; the token stays. A lapsed one is never
-- revived, though nobody has taken the lock since (L5).

local id, token, ttl_ms, retain_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]

local record, instead = read()
if not record then return instead end
local mine = held_by(record, id, token)
if not mine then return {'lost'} end

local sooner = now + ttl_ms * 1000 < mine.expires
mine.expires, mine.ttl = now + ttl_ms * 1000, ttl_ms
store(mine)
keep(record, retain_ms)
-- Whoever waits for its lapse has to hear that it comes earlier than was told.
if sooner then tell() end
return {'renewed'}
