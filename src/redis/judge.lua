-- The one rule of fencing, as `fencelock::token::judge` states it, inside the server.
--
-- A resource's watermark is a hash: token, holder, seq, domain, and the writer of its value. Numbers
-- are compared as text, padded to 20 digits: above 2^53 a double takes neighbours for equal.

local function fencelock_pad(digits) return string.rep('0', 20 - #digits) .. digits end

-- a + b for padded digits and a number below 2^53, in two halves of ten digits.
local function fencelock_add(a, b)
  local low = tonumber(string.sub(a, 11)) + b % 10000000000
  local high = tonumber(string.sub(a, 1, 10)) + math.floor(b / 10000000000) + math.floor(low / 10000000000)
  return string.format('%010.0f%010.0f', high, low % 10000000000)
end

local function fencelock_now()
  local clock = redis.call('TIME')
  return clock[1] * 1000000 + clock[2]
end

-- What the resource remembers, or nil and why it cannot be read. An unknown one is all empty.
local function fencelock_watermark(key)
  local fields = redis.pcall('HMGET', key, 'token', 'holder', 'seq', 'domain', 'writer')
  if fields.err then
    if string.find(fields.err, 'WRONGTYPE', 1, true) then return nil, {'corrupt', 'it is not a hash'} end
    return nil, fields
  end
  local w = {token = fields[1] or '', holder = fields[2] or '', seq = fields[3] or '0', domain = fields[4] or '', writer = fields[5] or ''}
  local legible = string.match(w.token, '^%d*$') and #w.token <= 19 and string.match(w.seq, '^%d+$') and #w.seq <= 19
  if not legible or (w.token == '' and redis.call('EXISTS', key) == 1) then return nil, {'corrupt', 'its token is illegible'} end
  return w
end

-- What follows the verdict in every answer: the watermark, and the time it was judged by.
local function fencelock_words(verdict, w)
  return {verdict, w.token, w.holder, w.seq, w.domain, string.format('%.0f', fencelock_now()), w.writer}
end

-- May this fence do what it intends ('write', 'raise' or 'rebind')? Answers 'applied' or 'repeated'
-- with the watermark that is to be stored in the same script, or 'refused' with the present one.
local function fencelock_judge(w, fence, intent)
  local token, holder, domain, seq = string.match(fence, '^v1:(%d+):([^:]+):([^:]+):?(%d*)$')
  if not token or #token > 19 then return 'malformed', w end
  if holder == '-' then holder = '' end
  if domain == '-' then domain = '' end
  if intent == 'rebind' and domain == '' then return 'refused', w end
  local shown, known = fencelock_pad(token), fencelock_pad(w.token)
  local by_clock = fencelock_add(fencelock_pad('0'), fencelock_now() + 86400000000)
  if shown > fencelock_add(known, 4294967296) and shown > by_clock then return 'refused', w end
  local same_domain = w.domain == '' or domain == '' or w.domain == domain
  if not same_domain and intent ~= 'rebind' then return 'refused', w end
  if shown < known then return 'refused', w end
  local applied = (intent == 'write' and seq ~= '') and seq or nil
  if shown > known then
    local bound = (intent == 'rebind' or w.domain == '') and domain or w.domain
    return 'applied', {token = token, holder = holder, seq = applied or '0', domain = bound, writer = w.writer}
  end
  if not same_domain then return 'refused', w end
  if w.holder ~= '' and holder ~= '' and w.holder ~= holder then return 'refused', w end
  if applied and fencelock_pad(applied) < fencelock_pad(w.seq) then return 'refused', w end
  local verdict = (applied and applied == w.seq) and 'repeated' or 'applied'
  return verdict, {
    token = token, holder = w.holder ~= '' and w.holder or holder, seq = applied or w.seq,
    domain = w.domain ~= '' and w.domain or domain, writer = w.writer,
  }
end

local function fencelock_store(key, w)
  redis.call('HSET', key, 'token', w.token, 'holder', w.holder, 'seq', w.seq, 'domain', w.domain)
end
