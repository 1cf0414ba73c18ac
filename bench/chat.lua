-- wrk script: streaming chats whose prompts begin with one of a few shared prefixes.
-- Environment: BENCH_MODEL, BENCH_TOKENS (of each answer), BENCH_WORDS (of each prompt),
-- BENCH_PREFIXES, BENCH_VOCABULARY (words with spaces between), BENCH_KEYS (likewise, perhaps none:
-- each request is sent with one of them). Prints one JSON line at the end.

local model, tokens = os.getenv("BENCH_MODEL"), os.getenv("BENCH_TOKENS")
local words, prefixes = tonumber(os.getenv("BENCH_WORDS")), tonumber(os.getenv("BENCH_PREFIXES"))
local vocabulary, shared, headers = {}, {}, {}
for word in os.getenv("BENCH_VOCABULARY"):gmatch("%S+") do vocabulary[#vocabulary + 1] = word end

for key in os.getenv("BENCH_KEYS"):gmatch("%S+") do
  headers[#headers + 1] = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key }
end
if #headers == 0 then headers[1] = { ["Content-Type"] = "application/json" } end

-- A question of its own at the end: a fifth of a short prompt, 20 words of a long one.
local own = math.max(4, math.min(20, math.floor(words / 5)))

local function text(count)
  local chosen = {}
  for place = 1, count do chosen[place] = vocabulary[math.random(#vocabulary)] end
  return table.concat(chosen, " ")
end

function init(args)
  math.randomseed(words)
  for number = 1, prefixes do shared[number] = text(words - own) end
  math.randomseed(os.time())
end

function request()
  local prompt = shared[math.random(prefixes)] .. " " .. text(own)
  local body = '{"model":"' .. model .. '","stream":true,"max_tokens":' .. tokens
    .. ',"messages":[{"role":"user","content":"' .. prompt .. '"}]}'
  return wrk.format("POST", nil, headers[math.random(#headers)], body)
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"refused":%d,"broken":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
