-- What every lock script begins with: the record of one lock, judged by the server's clock.
--
-- KEYS[1] is a hash, and its name is also the channel on which changes are told:
--   last   the last token              cap   how many may hold the lock at once
--   name   the lock's exact name       idle  when it was last given up, in microseconds
--   h:ID   a holder: "TOKEN EXPIRES_US TTL_MS STATE INFO"; STATE is 1 while it holds, and 0 while
--          a released grant lingers
-- Numbers are doubles here: exact below 2^53, where tokens end and which microseconds since 1970
-- reach in 2255. Scripts read first and write last, so that whatever a server refuses (no memory,
-- read only, too few replicas) is refused before anything is done.

local MAX = 9007199254740991
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

local function text(number) return string.format('%.0f', number) end

local function pad(digits) return string.rep('0', 20 - #digits) .. digits end

-- The bound on jumps (S11). Compared as text: a forged number may be more than a double holds.
local function limit(last) return math.max((last or 0) + 4294967296, now + 86400000000) end
local function too_far(digits, last) return pad(digits) > pad(text(limit(last))) end

local function number(value)
  if type(value) ~= 'string' or not string.match(value, '^%d+$') or #value > 16 then return nil end
  local n = tonumber(value)
  return n <= MAX and n or nil
end

-- The record without lapsed grants, or nil and what to answer instead.
local function read()
  local fields = redis.pcall('HGETALL', KEYS[1])
  if fields.err then
    if string.find(fields.err, 'WRONGTYPE', 1, true) then return nil, {'corrupt', 'it is not a hash'} end
    return nil, fields
  end
  local record = {exists = #fields > 0, holders = {}, lapsed = {}, idle = 0}
  for i = 1, #fields, 2 do
    local field, value = fields[i], fields[i + 1]
    if string.sub(field, 1, 2) == 'h:' then
      local token, expires, ttl, state, info = string.match(value, '^(%d+) (%d+) (%d+) ([01]) (.*)$')
      token, expires, ttl = number(token), number(expires), number(ttl)
      if not (token and expires and ttl) then return nil, {'corrupt', 'a holder is illegible'} end
      local holder = {field = field, token = token, expires = expires, ttl = ttl, state = state, info = info}
      table.insert(expires > now and record.holders or record.lapsed, holder)
    elseif field == 'last' or field == 'cap' or field == 'idle' then
      record[field] = number(value)
      if not record[field] then return nil, {'corrupt', field .. ' is not a number'} end
    else
      record[field] = value
    end
  end
  for _, holder in ipairs(record.lapsed) do record.idle = math.max(record.idle, holder.expires) end
  for _, holder in ipairs(record.holders) do
    if not record.last or holder.token > record.last then return nil, {'corrupt', 'a holder has a token that was never minted'} end
  end
  if record.exists and not record.last then return nil, {'corrupt', 'it has no last token'} end
  return record
end

-- The grant that a holder has and has not given up; with this token, where one is named.
local function held_by(record, id, token)
  for _, holder in ipairs(record.holders) do
    if holder.field == 'h:' .. id and holder.state == '1' and (token == '' or text(holder.token) == token) then return holder end
  end
end

-- A field is deleted before it is written anew: at the memory limit a server refuses what may
-- need memory first, and a lock that is held must be renewed and released even then.
local function store(holder)
  redis.call('HDEL', KEYS[1], holder.field)
  redis.call('HSET', KEYS[1], holder.field, table.concat({text(holder.token), text(holder.expires), text(holder.ttl), holder.state, holder.info}, ' '))
end

-- How long the record stays: for ever where retain_ms is 0, else for that long after its last
-- grant ends *and* the clock has passed its last token, from when on the clock is floor enough.
local function keep(record, retain_ms)
  if tonumber(retain_ms) == 0 then return redis.call('PERSIST', KEYS[1]) end
  local last_us = math.max(now, record.last or 0)
  for _, holder in ipairs(record.holders) do last_us = math.max(last_us, holder.expires) end
  redis.call('PEXPIREAT', KEYS[1], text(math.floor(last_us / 1000) + retain_ms))
end

local function tell() redis.call('PUBLISH', KEYS[1], '') end
