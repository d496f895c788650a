package redisdedupe

import "github.com/redis/go-redis/v9"

// A key is a hash:
//
//	st   r running, f free again, p parked, d done
//	own  owner of the claim, or of the one that completed it
//	tok  fencing token
//	exp  when the lease runs out, in milliseconds
//	att  how often handling has begun
//	unk  1 if an owner vanished and nobody has said since what came of it
//	fp   fingerprint, in hexadecimal
//	fld  fields of the content; empty is none
//	key  the readable parts as a JSON array; not there if none are kept
//	rep  reply behind an r; empty is none
//	at   when it was done, in milliseconds
//
// Numbers are written by string.format, because Lua's own form of a large one
// loses digits.

const clock = `
local t = redis.call('TIME')
local us = t[1] * 1000000 + t[2]
local now = math.floor(us / 1000)
local function int(x) return string.format('%.0f', x) end
`

var acquireScript = redis.NewScript(clock + `
local owner, fp, lease, retain, fld, key = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5], ARGV[6]
local h = redis.call('HMGET', KEYS[1], 'st', 'own', 'tok', 'exp', 'att', 'unk', 'fp', 'rep', 'at', 'fld')
local st, own, tok, exp, att, unk = h[1], h[2], tonumber(h[3] or 0), tonumber(h[4] or 0), tonumber(h[5] or 0), h[6] or '0'
if st == 'd' then return {'done', h[7], h[8], h[9], h[10] or ''} end
if (st == 'r' or st == 'p' or unk == '1') and h[7] ~= fp then return {'done', h[7], '', '0', h[10] or ''} end
if st == 'r' and own == owner then return {'grant', int(tok), int(att), unk} end
if st == 'p' then return {'parked'} end
if st == 'r' and exp > now then return {'busy', int(exp - now)} end
if st == 'r' then unk = '1' end
tok, att = math.max(us, tok + 1), att + 1
redis.call('HSET', KEYS[1], 'st', 'r', 'own', owner, 'tok', int(tok), 'exp', int(now + lease), 'att', int(att), 'unk', unk, 'fp', fp, 'fld', fld)
if key ~= '' then redis.call('HSET', KEYS[1], 'key', key) end
redis.call('PEXPIRE', KEYS[1], int(math.max(retain, 2 * lease)))
return {'grant', int(tok), int(att), unk}
`)

// allowOOM lets a script write although the server's memory is full: what ends
// a claim must not fail because no new one could be granted. Scripts run under
// the flag since Redis 7.0.
const allowOOM = "#!lua flags=allow-oom\n"

// ours answers whether the claim is still the caller's.
const ours = `
local h = redis.call('HMGET', KEYS[1], 'st', 'own', 'tok')
local ours = h[2] == ARGV[1] and h[3] == ARGV[2]
`

var extendScript = redis.NewScript(allowOOM + clock + ours + `
if not ours or h[1] ~= 'r' then return 0 end
local lease = tonumber(ARGV[3])
redis.call('HSET', KEYS[1], 'exp', int(now + lease))
if redis.call('PTTL', KEYS[1]) < 2 * lease then redis.call('PEXPIRE', KEYS[1], int(2 * lease)) end
return 1
`)

var completeScript = redis.NewScript(allowOOM + clock + ours + `
if not ours or h[1] ~= 'r' and h[1] ~= 'd' then return 0 end
if h[1] == 'd' then return 1 end
redis.call('HSET', KEYS[1], 'st', 'd', 'rep', ARGV[3], 'at', int(now), 'unk', '0')
redis.call('HDEL', KEYS[1], 'exp')
redis.call('PEXPIRE', KEYS[1], ARGV[4])
return 1
`)

var releaseScript = redis.NewScript(allowOOM + ours + `
if not ours or h[1] ~= 'r' then return 0 end
redis.call('HSET', KEYS[1], 'st', ARGV[3], 'unk', ARGV[4])
redis.call('HDEL', KEYS[1], 'exp')
return 1
`)

// conflictScript keeps the first record of a fingerprint.
var conflictScript = redis.NewScript(clock + `
redis.call('HSETNX', KEYS[1], ARGV[1], int(now) .. ' ' .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
`)

// findScript reads a key and how many conflicts it has; the state is judged by
// the server's clock.
var findScript = redis.NewScript(clock + `
local h = redis.call('HMGET', KEYS[1], 'st', 'own', 'tok', 'exp', 'att', 'unk', 'fp', 'rep', 'at', 'key')
if not h[1] then return {} end
local st = h[1]
if st == 'r' and tonumber(h[4]) <= now or st == 'f' and h[6] == '1' then st = 'u' end
local size = -1
if st == 'd' and h[8] and h[8] ~= '' then size = #h[8] - 1 end
local ttl = redis.call('PTTL', KEYS[1])
return {st, h[2] or '', h[3] or '0', h[4] or '0', h[5] or '0', h[7] or '', int(size), h[9] or '0', int(now + ttl), h[10] or '', int(redis.call('HLEN', KEYS[2]))}
`)

// freeScript releases an unknown or parked key for its admin.
var freeScript = redis.NewScript(clock + `
local h = redis.call('HMGET', KEYS[1], 'st', 'exp', 'unk')
if h[1] == 'p' or h[1] == 'f' and h[3] == '1' or h[1] == 'r' and tonumber(h[2]) <= now then
	redis.call('HSET', KEYS[1], 'st', 'f', 'unk', '0')
	return 1
end
return 0
`)
