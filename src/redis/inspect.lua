-- The state of a lock as one moment saw it. ARGV[1] is 'break' to take it from its holders, which
-- answers the state before; the last token stays, so that the next one is larger than theirs.

local record, instead = read()
if not record then return instead end
if not record.exists then return {'none'} end

local state = {'state', record.name or '', text(record.last), text(record.cap or 0)}
for _, holder in ipairs(record.holders) do
  table.insert(state, string.sub(holder.field, 3))
  table.insert(state, text(holder.token))
  table.insert(state, text(holder.expires - now))
  table.insert(state, text(holder.ttl))
  table.insert(state, holder.state)
  table.insert(state, holder.info)
end

if ARGV[1] == 'break' then
  if #record.holders > 0 then
    for _, holder in ipairs(record.holders) do redis.call('HDEL', KEYS[1], holder.field) end
    redis.call('HSET', KEYS[1], 'idle', text(now))
    record.holders = {}
    keep(record, ARGV[2])
  end
  tell()
end
return state
