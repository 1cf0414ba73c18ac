"""Every metric of a front door: its name, kind, labels, meaning and buckets, as a table.

What counts refers to these, and `docs/reference/metrics.md` and the dashboards are made of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from attrs import frozen
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

MAX_PRINCIPALS = 500
"""Each takes a handful of time series, and Prometheus keeps every one that it ever saw."""
# fmt: off
TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60,
                  120, 300, 600, 1200, 3600)
ITL_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 10)
_DURATION_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600,
                       1800, 3600, 10800)
# fmt: on
_LENGTH_BUCKETS = tuple(2**power for power in range(4, 22))
_RATE_BUCKETS = tuple(tenth / 10 for tenth in range(11))
_ROUTING_BUCKETS_S = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.005, 0.02)
_HANDOVER_BUCKETS_S = (0.001, 0.0025, *TTFT_BUCKETS_S)
_BANDWIDTH_BUCKETS = tuple(float(10**power) for power in range(5, 12))


@frozen(eq=False)
class Family:
    """One metric: its samples differ in the values of its labels."""

    name: str
    """As samples are named in the text that is scraped; a histogram's without `_bucket`."""
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    meaning: str
    buckets: tuple[float, ...] = ()
    """Of a histogram: upper bounds, ascending; what is beyond the last is counted, too."""
    is_read: bool = False
    """Whether values are read when somebody scrapes; else each event is counted as it comes."""

    def metric(self) -> Any:
        """Prometheus' own description, without samples."""
        return _DESCRIPTIONS[self.kind](self.name, self.meaning, labels=self.labels)


_DESCRIPTIONS = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _family(
    kind: Literal["counter", "gauge", "histogram"],
    what: str,
    meaning: str,
    buckets: tuple[float, ...] = (),
    *,
    is_read: bool = False,
) -> Family:
    """``what`` as in `requests{model,code}`: the name, less what all have in common, and labels."""
    name, _, labels = what.rstrip("}").partition("{")
    name = f"commutator_{name}_total" if kind == "counter" else f"commutator_{name}"
    return Family(name, kind, tuple(filter(None, labels.split(","))), meaning, buckets, is_read)


_counter = partial(_family, "counter")
_histogram = partial(_family, "histogram")
_gauge = partial(_family, "gauge", is_read=True)
_total = partial(_family, "counter", is_read=True)

# Requests
REQUESTS = _counter(
    "requests{endpoint,model,code}", "Requests answered; code 499 means that the client went away."
)
REQUESTS_REJECTED = _counter(
    "requests_rejected{model,reason}", "Requests answered 429; the reason is the error's code."
)
CONNECTIONS_DROPPED = _counter(
    "connections_dropped{reason}",
    "Connections of clients that the front door closed or did not accept: one that waited longest"
    " for its client, because the door or its places for probes were full or files ran out (full,"
    " full_for_probes, no_descriptors); a new one (full_for_address, not_accepted); one with slow"
    " or long headers (headers_too_slow, headers_too_long); one that did not read its answer "
    "(unread_answer).",
)
LONG_TURNS = _counter(
    "event_loop_long_turns",
    "Times that a front door computed for 50 ms or more while all its clients waited; the log says"
    " what.",
)
LONG_TURN_SECONDS = _counter("event_loop_long_turn_seconds", "CPU time of those long turns.")
ROUTER_QUEUE_SECONDS = _histogram(
    "router_queue_seconds{model}",
    "Time that requests waited for a worker, of those that got one after a wait.",
    _DURATION_BUCKETS_S,
)
TIME_TO_FIRST_TOKEN_SECONDS = _histogram(
    "time_to_first_token_seconds{model}",
    "From a request's arrival to the first token of each answer.",
    TTFT_BUCKETS_S,
)
INTER_TOKEN_LATENCY_SECONDS = _histogram(
    "inter_token_latency_seconds{model}",
    "Between tokens of one answer; for tokens that came together, their mean.",
    ITL_BUCKETS_S,
)
REQUEST_DURATION_SECONDS = _histogram(
    "request_duration_seconds{endpoint,model}",
    "From a request's arrival to the end of the answer.",
    _DURATION_BUCKETS_S,
)
PROMPT_TOKENS = _counter("prompt_tokens{model}", "Prompt tokens of answers.")
CACHED_TOKENS = _counter(
    "cached_tokens{model}", "Prompt tokens that the workers found in their KV caches."
)
OUTPUT_TOKENS = _counter("output_tokens{model}", "Tokens generated.")
PROMPT_CACHE_HIT_TOKENS = _counter(
    "prompt_cache_hit_tokens{model}",
    "Prompt tokens that the front door did not have to tokenize again.",
)
TOKENIZER_DIFFERENCES = _counter(
    "tokenizer_differences{model}",
    "Times that fastokens or the prompt cache gave other tokens than tokenizers; from then on, "
    "tokenizers alone tokenizes the model's prompts.",
)
INPUT_SEQUENCE_TOKENS = _histogram(
    "input_sequence_tokens{model}", "Prompt tokens of each request.", _LENGTH_BUCKETS
)
OUTPUT_SEQUENCE_TOKENS = _histogram(
    "output_sequence_tokens{model}", "Tokens generated for each request.", _LENGTH_BUCKETS
)

# Routing
ROUTER_DECISION_SECONDS = _histogram(
    "router_decision_seconds{model}",
    "Time to match a prompt against the prefix index and ask the policy.",
    _ROUTING_BUCKETS_S,
)
ROUTER_OVERLAP_BLOCKS = _counter(
    "router_overlap_blocks{model}",
    "Prompt blocks that the chosen worker was thought to hold; absent under policies that do not "
    "look.",
)
ROUTER_KV_HIT_RATE = _histogram(
    "router_kv_hit_rate{model}",
    "The part of a prompt's blocks that the chosen worker was thought to hold, 0 to 1; absent "
    "under policies that do not look.",
    _RATE_BUCKETS,
)
ROUTER_FALLBACKS = _counter(
    "router_fallbacks{model}",
    "Requests whose policy failed; the worker with the fewest requests got them.",
)
ROUTER_GIVEN_UP_BLOCKS = _counter(
    "router_given_up_blocks{model}",
    "Prompt blocks that another worker held beyond the chosen one's: reuse for balance; absent "
    "under policies that do not look.",
)
MIGRATIONS = _counter(
    "migrations{model,reason}",
    "Answers that another worker continued, by what happened to the worker before.",
)
MIGRATED_TOKENS = _counter(
    "migrated_tokens{model}",
    "Tokens of prompts and answers computed again because their worker was lost.",
)

# Disaggregation
DISAGGREGATION_DECISIONS = _counter(
    "disaggregation_decisions{model,separate,reason}",
    "Requests that could have been prefilled elsewhere, by whether they were and why.",
)
HANDOVER_LEGS = _counter(
    "handover_legs{model,leg,outcome}",
    "Prefill and decode sides by how they ended; refused: no prefill worker had room.",
)
PREFILL_QUEUE_SECONDS = _histogram(
    "prefill_queue_seconds{model}",
    "Time that requests waited for a prefill worker, of those that got one after a wait.",
    _HANDOVER_BUCKETS_S,
)
HANDOVER_SECONDS = _histogram(
    "handover_seconds{model}",
    "From the end of a prefill elsewhere to the decode worker's first token.",
    _HANDOVER_BUCKETS_S,
)
HANDOVER_BYTES = _counter(
    "handover_bytes{model}",
    "KV bytes of the prompts that were handed over, less what was known to be cached.",
)
HANDOVER_BANDWIDTH_BYTES_PER_SECOND = _histogram(
    "handover_bandwidth_bytes_per_second{model}",
    "KV bytes of each hand-over by its time after the prefill; part of them went before.",
    _BANDWIDTH_BUCKETS,
)

# Principals
PRINCIPAL_REQUESTS = _counter(
    "principal_requests{principal}",
    f"Requests of a principal; `other`: of all after the first {MAX_PRINCIPALS}.",
)
PRINCIPAL_PROMPT_TOKENS = _counter(
    "principal_prompt_tokens{principal}", "Prompt tokens of a principal's requests."
)
PRINCIPAL_CACHED_TOKENS = _counter(
    "principal_cached_tokens{principal}",
    "Prompt tokens of a principal that the workers found in their KV caches.",
)
PRINCIPAL_OUTPUT_TOKENS = _counter(
    "principal_output_tokens{principal}", "Tokens generated for a principal."
)
PRINCIPAL_REFUSALS = _counter(
    "principal_refusals{principal,reason}",
    "Requests of a principal answered 403 or 429, by the limit or the error's code.",
)
ALIAS_REQUESTS = _counter(
    "alias_requests{alias,model}",
    "Requests that ended, by what the client asked for and the model that served it.",
)
MODEL_FALLBACKS = _counter(
    "model_fallbacks{alias,model,to,reason}",
    "Requests that another model served, because `model` could not.",
)
HANDOVER_CANCEL_SECONDS = _histogram(
    "handover_cancel_seconds{model}",
    "From the failure of one side until the other was stopped.",
    _HANDOVER_BUCKETS_S,
)

# Read at a scrape: the front door
ACTIVE_REQUESTS = _gauge("active_requests", "Requests being served.")
QUEUED_REQUESTS = _gauge("queued_requests", "Requests waiting for a place in the front door.")
ROUTER_LOAD_PEERS = _gauge(
    "router_load_peers", "Other front doors that share their load with this one."
)
REGISTRY_AGE_SECONDS = _gauge(
    "registry_age_seconds",
    "Seconds since the registry confirmed this front door's view of the workers.",
)
BUILD_INFO = _gauge("build_info{version}", "Always 1; the label is the version.")
MODEL_READY = _gauge(
    "model_ready{model}",
    "1 while the model has the workers that it needs to be served, 0 otherwise.",
)
WORKER_STATE = _gauge(
    "worker_state{worker,model,role,state}",
    "1 for the state that a worker is in: ready, draining or unreachable. A worker whose lease "
    "lapsed has none.",
)
WORKER_ACTIVE_REQUESTS = _gauge(
    "worker_active_requests{worker,model,role}",
    "Requests in flight at a worker, from all front doors that share their load.",
)
PROMPT_CACHE_BYTES = _gauge(
    "prompt_cache_bytes{model}", "Memory that the front door's cache of tokenized prompts takes."
)
ROUTER_QUEUE_REQUESTS = _gauge(
    "router_queue_requests{model}", "Requests waiting because every worker is busy."
)
PREFILL_QUEUE_REQUESTS = _gauge(
    "prefill_queue_requests{model}", "Requests waiting because every prefill worker is busy."
)
PREFILL_QUEUE_AGE_SECONDS = _gauge(
    "prefill_queue_age_seconds{model}", "Age of the oldest request waiting for a prefill worker."
)

# KV events of workers
EVENT_WARNINGS = _gauge(
    "router_event_warnings{worker,cause}",
    "1 while this makes what is known of a worker's cache incomplete or wrong; /health says it in"
    " words.",
)
ROUTER_INDEXED_BLOCKS = _gauge(
    "router_indexed_blocks{worker,tier}",
    "KV blocks that a worker is known, or guessed, to hold, in the router's block size.",
)
EVENT_MESSAGES = _total(
    "router_event_messages{worker}", "KV event messages of a worker that were understood."
)
EVENT_MESSAGES_UNDECODABLE = _total(
    "router_event_messages_undecodable{worker}",
    "Messages of a worker that could not be read as KV events.",
)
EVENT_MESSAGES_LOST = _total(
    "router_event_messages_lost{worker}",
    "KV event messages of a worker that are lost: no replay recovered them.",
)
EVENT_GAPS = _total("router_event_gaps{worker}", "Gaps in the numbers of a worker's messages.")
EVENT_REPLAYS = _total(
    "router_event_replays{worker}", "Replays requested from a worker; some are regular checks."
)
EVENT_REPLAYS_FAILED = _total(
    "router_event_replays_failed{worker}", "Replays that were not answered, or not to the end."
)
EVENT_RESYNCS = _total(
    "router_event_resyncs{worker}",
    "Times that a worker's blocks left the prefix index because messages were lost.",
)
EVENT_ENGINE_RESTARTS = _total(
    "router_event_engine_restarts{worker}",
    "Times that a worker's messages began anew: its engine restarted.",
)
EVENT_INTERRUPTIONS = _total(
    "router_event_interruptions{worker}",
    "Times that the subscription broke, or dropped messages because they were read too slowly.",
)

# Storage tiers of workers
KV_TIER_UP = _gauge("kv_tier_up{worker,tier}", "1 while the tier can be used, 0 otherwise.")
KV_BLOCKS = _gauge(
    "kv_blocks{worker,tier,state}",
    "KV blocks in a tier by state; loading and retained ones are published, too.",
)
KV_CAPACITY_BLOCKS = _gauge(
    "kv_capacity_blocks{worker,tier}", "Blocks that fit into a bounded tier."
)
KV_LOAD_LATENCY_SECONDS = _gauge(
    "kv_load_latency_seconds{worker,tier}",
    "Measured time of a load from a tier, beside that of its blocks.",
)
KV_LOAD_BLOCK_SECONDS = _gauge(
    "kv_load_block_seconds{worker,tier}", "What each block adds to a load, as measured."
)
KV_TOKEN_BYTES = _gauge(
    "kv_token_bytes{worker,layers}",
    "KV bytes of one more token of a sequence in layers of one kind, on each rank; 0 for states.",
)
KV_SEQUENCE_MOST_BYTES = _gauge(
    "kv_sequence_most_bytes{worker,layers}",
    "The most KV bytes of a sequence, however long, in layers with a window or a state.",
)
KV_LOADS = _total(
    "kv_loads{worker,tier,outcome}",
    "Blocks requested from a tier, by outcome; only `loaded` ones were used.",
)
KV_NOT_LOADED = _total(
    "kv_not_loaded{worker,tier,reason}",
    "Blocks that a tier had and that were computed instead of loaded, by reason.",
)
KV_REMOVED = _total("kv_removed{worker,tier,reason}", "Blocks that left a tier.")
KV_PREFETCHED = _total(
    "kv_prefetched{worker,tier,outcome}",
    "Blocks brought up from a slower tier before they were asked for; of these the ones used "
    "since, and those that left unused.",
)
KV_FAILED_VERIFICATION = _total(
    "kv_failed_verification{worker,tier,when}",
    "Blocks whose checksum was wrong: when loaded, moved to another tier, or by kv verify.",
)
KV_STORED = _total("kv_stored{worker,source,tier}", "Blocks stored in a tier.")
KV_NOT_ADMITTED = _total(
    "kv_not_admitted{worker,source,tier,reason}", "Blocks offered to a tier that it did not take."
)
KV_STORE_FAILED = _total(
    "kv_store_failed{worker,source,tier,reason}", "Blocks that a tier accepted and failed to store."
)

# Hand-overs of workers
WORKER_HELD_BLOCKS = _gauge(
    "worker_handover_held_blocks{worker}", "Blocks that a prefill worker holds for decode workers."
)
WORKER_EXPORTS = _total(
    "worker_handover_exports{worker,outcome}",
    "Hand-overs of a prefill worker by how they ended: released by the decode worker, failed, or "
    "lapsed because no decode worker asked in time.",
)
WORKER_PULLS = _total(
    "worker_handover_pulls{worker,outcome}",
    "Hand-overs of a decode worker by how they ended; dropped: aborted, or not needed.",
)
WORKER_PULLED_BYTES = _total(
    "worker_handover_pulled_bytes{worker}", "KV bytes that a decode worker read and verified."
)
WORKER_NIXL_BYTES = _total(
    "worker_handover_nixl_bytes{worker}",
    "KV bytes that a decode worker read, by NIXL's own telemetry.",
)
WORKER_PULL_SECONDS = _total(
    "worker_handover_pull_seconds{worker}",
    "Time that a decode worker's requests spent reading, waits for prefill included.",
)

# The planner
PLANNER_DESIRED_WORKERS = _gauge(
    "planner_desired_workers{role}", "Workers that the plan wants, within bounds, budget and holds."
)
PLANNER_PROPOSED_WORKERS = _gauge(
    "planner_proposed_workers{role}",
    "Workers that the demand needs, as the planner's policy computes.",
)
PLANNER_READY_WORKERS = _gauge("planner_ready_workers{role}", "Workers that get requests.")
PLANNER_STARTING_WORKERS = _gauge(
    "planner_starting_workers{role}", "Workers that were started and are not ready."
)
PLANNER_DRAINING_WORKERS = _gauge(
    "planner_draining_workers{role}", "Workers that get no more requests."
)
PLANNER_SPEED_SAMPLES = _gauge(
    "planner_speed_samples{role}",
    "Measured times that the planner's idea of a worker's speed rests on.",
)
PLANNER_SPEED_RESIDUAL_RATIO = _gauge(
    "planner_speed_residual_ratio{role}",
    "How far measured times are from that speed: 0.1 is 10 %; absent while too few are known.",
)
PLANNER_ATTAINED_RATIO = _gauge(
    "planner_attained_ratio{target}",
    "The part of the last interval's requests that met a target; absent without any.",
)
PLANNER_WAITING_REQUESTS = _gauge(
    "planner_waiting_requests", "Requests of all front doors without a worker."
)
PLANNER_ACTS = _gauge("planner_acts", "1 in the mode act, 0 where the planner only advises.")
PLANNER_TICK_SECONDS = _gauge("planner_tick_seconds", "How long the last plan took to make.")
PLANNER_PLANS = _total("planner_plans", "Plans made.")
PLANNER_ACTIONS = _total("planner_actions{kind}", "What was done to workers.")
PLANNER_WARNINGS = _gauge("planner_warnings", "Warnings of the last plan.")
PLANNER_TUNING_VALUE = _gauge(
    "planner_tuning_value{option}", "The value of each tunable option, for requests in no trial."
)
PLANNER_TUNING_SHARE_RATIO = _gauge(
    "planner_tuning_share_ratio",
    "The part of the requests that get the tried value now: in a switchback all or none.",
)
PLANNER_TUNING_REQUESTS = _gauge(
    "planner_tuning_requests{value,outcome}",
    "Requests of the present trial that ended, with the value before and the tried one.",
)
PLANNER_TUNING_STEPS = _total(
    "planner_tuning_steps{kind}",
    "What tuning did: searched, advised, tried, promoted, settled, rolled_back.",
)
REFUSED_CONNECTIONS = _total(
    "refused_connections{process,service}",
    "Connections refused because the other process did not prove that it belongs to this "
    "deployment.",
)

FAMILIES = tuple(value for value in globals().values() if isinstance(value, Family))
"""All of them, in this order."""
