-- Removes the record of a lock that nobody has held for idle_us, once the clock is so far past its
-- last token that it is floor enough: the next token is larger even if the clock is set back by
-- margin_us (L10).

local idle_us, margin_us = tonumber(ARGV[1]), tonumber(ARGV[2])

local record, instead = read()
if not record then return instead end
if not record.exists then return {'none'} end
if #record.holders > 0 or record.idle + idle_us > now or record.last + margin_us > now then return {'kept'} end
redis.call('DEL', KEYS[1])
return {'removed'}
