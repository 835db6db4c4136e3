-- Grants a permit, with a token that is minted in the same step (L8), or says who holds the lock.
-- A grant without a token does not exist: whatever fails here fails before the first write.

local id, name, permits, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local above, counts, ceiling, retain_ms, info = ARGV[5], ARGV[6] == 'counter', tonumber(ARGV[7]), ARGV[8], ARGV[9]

local record, instead = read()
if not record then return instead end
if record.exists and record.name ~= name then return {'corrupt', 'it is the record of another name'} end
if #record.holders > 0 and record.cap ~= permits then return {'capacity', text(record.cap or 0)} end

-- The same request again: its answer was lost, and this is the grant that it got (L7).
local mine = held_by(record, id, '')
if mine then
  local sooner = now + ttl_ms * 1000 < mine.expires
  mine.expires, mine.ttl = now + ttl_ms * 1000, ttl_ms
  store(mine)
  keep(record, retain_ms)
  if sooner then tell() end
  return {'granted', text(mine.token)}
end

if #record.holders >= permits then
  local first = record.holders[1]
  for _, holder in ipairs(record.holders) do if holder.expires < first.expires then first = holder end end
  return {'held', text(first.expires - now), first.info}
end

-- One forged watermark must not use the tokens up.
if above ~= '' and too_far(above, record.last) then return {'far', text(record.last or 0), text(limit(record.last))} end
local token = math.max((record.last or 0) + 1, (tonumber(above) or 0) + 1)
-- The clock as a floor: tokens go on upwards where a failover, an eviction or a flush lost `last`.
if not counts then token = math.max(token, now) end
if token > ceiling then return {'exhausted', text(record.last or 0)} end

local holder = {field = 'h:' .. id, token = token, expires = now + ttl_ms * 1000, ttl = ttl_ms, state = '1', info = info}
redis.call('HSET', KEYS[1], 'last', text(token), 'cap', text(permits), 'name', name)
for _, lapsed in ipairs(record.lapsed) do redis.call('HDEL', KEYS[1], lapsed.field) end
store(holder)
record.last = token
table.insert(record.holders, holder)
keep(record, retain_ms)
return {'granted', text(token)}
