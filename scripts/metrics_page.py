"""Writes ``docs/reference/metrics.md`` from the table of metrics."""

from __future__ import annotations

from pathlib import Path

from commutator.metrics.families import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "metrics.md"
HEAD = """# Metrics

`GET /metrics`, for Prometheus; generated from the code (`make docs`). Several front doors share a port, so whichever is asked answers for
all of them, with one label more, `frontend` (`frontend-0`, `frontend-1`, ...). [How to watch](../how-to/observe.md) has dashboards and
alerts for them.

"""
TAIL = """
Counters and histograms also have a `_created` time, and histograms `_bucket`, `_sum` and `_count`.

## Under the names of others

Panels made for another server work after a change of the prefix:

| here, `commutator_` | NVIDIA Dynamo, `dynamo_frontend_` | vLLM, `vllm:` |
|---|---|---|
| `requests_total` | `requests_total` | `request_success_total` |
| `active_requests`, `queued_requests` | `active_requests`, `queued_requests` | `num_requests_running`, `num_requests_waiting` |
| `time_to_first_token_seconds` | the same | the same |
| `inter_token_latency_seconds` | the same | the same |
| `request_duration_seconds` | the same | `e2e_request_latency_seconds` |
| `input_sequence_tokens`, `output_sequence_tokens` | the same | `request_prompt_tokens`, `request_generation_tokens` |
| `prompt_tokens_total`, `output_tokens_total` | `output_tokens_total` | `prompt_tokens_total`, `generation_tokens_total` |
| `cached_tokens_total` | `cached_tokens_sum` | `prefix_cache_hits_total` |
| `router_kv_hit_rate` | `dynamo_component_router_kv_hit_rate` | |

## Questions

How much of all prompts was found in a KV cache, as the engines tell:

```promql
sum(rate(commutator_cached_tokens_total[5m])) / sum(rate(commutator_prompt_tokens_total[5m]))
```

How much reuse the router gave up so that work stays balanced, of what the best workers held:

```promql
sum(rate(commutator_router_given_up_blocks_total[5m]))
/ (sum(rate(commutator_router_given_up_blocks_total[5m])) + sum(rate(commutator_router_overlap_blocks_total[5m])))
```

How long one routing decision takes, at the 99th percentile:

```promql
histogram_quantile(0.99, sum by (le) (rate(commutator_router_decision_seconds_bucket[5m])))
```

How much of what tiers had was not used, by reason (`commutator kv stats` shows the same):

```promql
sum by (tier, reason) (rate(commutator_kv_not_loaded_total[5m]))
```

Of which workers the router's view is incomplete or wrong, and why; then those whose events get lost:

```promql
commutator_router_event_warnings == 1
```

```promql
sum by (worker) (increase(commutator_router_event_messages_lost_total[1h])) > 0
```

Any increase of `commutator_kv_failed_verification_total` means a medium that does not keep what it is given. Metrics named
`commutator_kv_...` are the workers' own, asked for every 2 s.

A hit rate by `router_kv_hit_rate` well above the one by `cached_tokens_total` means that the router believes in
blocks which the workers no longer have: look for its warnings in `/health`.
"""


def page() -> str:
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{metric.name}` | {metric.kind} | {', '.join(metric.labels)} | {metric.meaning} |"
        for metric in FAMILIES
    ]
    return HEAD + "\n".join(lines) + "\n" + TAIL


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
