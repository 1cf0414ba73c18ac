-- wrk script: streaming chats whose prompts begin with one of a few shared texts.
-- Environment: BENCH_PARTS (a file; each line is a part of a body: first BENCH_BEGINNINGS
-- beginnings, then endings, which are used in turns), BENCH_KEYS (words with spaces between, perhaps
-- none: each request is sent with one of them). Prints one JSON line at the end.

local beginnings = tonumber(os.getenv("BENCH_BEGINNINGS"))
local parts, headers, turn = {}, {}, 0
for line in io.lines(os.getenv("BENCH_PARTS")) do parts[#parts + 1] = line end

for key in os.getenv("BENCH_KEYS"):gmatch("%S+") do
  headers[#headers + 1] = { ["Content-Type"] = "application/json", ["Authorization"] = "Bearer " .. key }
end
if #headers == 0 then headers[1] = { ["Content-Type"] = "application/json" } end

function init(args)
  math.randomseed(os.time())
end

function request()
  turn = turn % (#parts - beginnings) + 1
  local body = parts[math.random(beginnings)] .. parts[beginnings + turn]
  return wrk.format("POST", nil, headers[math.random(#headers)], body)
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '{"requests":%d,"duration_us":%d,"p50_us":%d,"p99_us":%d,"refused":%d,"broken":%d}\n',
    summary.requests, summary.duration, latency:percentile(50), latency:percentile(99),
    errors.status, errors.connect + errors.read + errors.write + errors.timeout))
end
