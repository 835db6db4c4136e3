-- Refuses a stale fence before anything that follows: the rest of the script runs, in the same
-- atomic step, only for a write that is admitted and new.
--
-- KEYS[1] is the resource's watermark (`fence_key`), in the slot of the keys that are written.
-- ARGV[1] is the fence in its text form. Answers instead of the rest of the script:
--   the error FENCED, DOMAINMISMATCH, INVALID or CORRUPT, with token= and watermark=, or
--   the status REPEATED where this very write was applied before.
do
  local w, instead = fencelock_watermark(KEYS[1])
  if not w then
    if instead.err then return instead end
    return redis.error_reply('CORRUPT the watermark is damaged: ' .. instead[2])
  end
  local verdict, next = fencelock_judge(w, ARGV[1], 'write')
  local token, holder, domain = string.match(ARGV[1], '^v1:(%d+):([^:]+):([^:]+)')
  if verdict == 'refused' then
    local code = 'FENCED'
    if fencelock_pad(token) > fencelock_pad(w.token) then code = 'INVALID' end
    if w.domain ~= '' and domain ~= '-' and w.domain ~= domain then code = 'DOMAINMISMATCH' end
    return redis.error_reply(code .. ' the write was refused token=' .. token .. ' watermark=' .. w.token)
  end
  if verdict == 'malformed' then return redis.error_reply('INVALID not a fence; expected v1:TOKEN:HOLDER:DOMAIN[:SEQ]') end
  fencelock_store(KEYS[1], next)
  if verdict == 'repeated' then return redis.status_reply('REPEATED') end
end
