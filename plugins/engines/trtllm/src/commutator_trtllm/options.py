"""The YAML file of a server, by its role. ``python -m commutator_trtllm.options`` prints it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, Literal

import yaml

__all__ = ["as_yaml", "server_options"]

Role = Literal["both", "prefill", "decode"]

_EVENT_BUFFER = 65536
"""Events that the server keeps until the sidecar has fetched them; they come several times a s."""

_KV_CONNECTOR = {
    # A block of which a part was reused could not be loaded.
    "kv_cache_config": {"enable_partial_reuse": False},
    "kv_connector_config": {
        "connector_module": "commutator_trtllm.kv_connector",
        "connector_scheduler_class": "CommutatorKvScheduler",
        "connector_worker_class": "CommutatorKvWorker",
    },
}


def server_options(
    role: Role,
    *,
    hands_over: bool = False,
    kv_events: bool = True,
    max_model_len: int | None = None,
    tiers: bool = False,
    laid_over: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a server needs so that all of the connector works. ``laid_over`` has the last word.

    ``max_model_len`` is in tokens; the cache transceiver must have room for the longest prompt.
    ``tiers``: with our KV connector, whose own options come by environment.
    """
    kv_cache: dict[str, Any] = {"enable_block_reuse": True}
    if kv_events:
        kv_cache["event_buffer_max_size"] = _EVENT_BUFFER
    options: dict[str, Any] = {"enable_iter_perf_stats": True, "kv_cache_config": kv_cache}
    if role != "both" or hands_over:
        transceiver: dict[str, Any] = {"backend": "NIXL"}
        if max_model_len is not None:
            transceiver["max_tokens_in_buffer"] = max_model_len
        options["cache_transceiver_config"] = transceiver
    if role == "prefill":
        options["disable_overlap_scheduler"] = True  # which context servers do not support
    if tiers:
        options = _merged(options, _KV_CONNECTOR)
    return _merged(options, laid_over or {})


def as_yaml(options: Mapping[str, Any]) -> str:
    """The text of the file."""
    return yaml.safe_dump(dict(options), sort_keys=False)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m commutator_trtllm.options",
        description="Prints what trtllm-serve needs in the file of --extra_llm_api_options.",
    )
    parser.add_argument("--role", choices=("both", "prefill", "decode"), default="both")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus answer, in tokens")
    parser.add_argument("--no-kv-events", action="store_true", help="nobody will read KV events")
    parser.add_argument("--tiers", action="store_true", help="keep KV blocks in storage tiers")
    given = parser.parse_args()
    options = server_options(
        given.role,
        kv_events=not given.no_kv_events,
        max_model_len=given.max_model_len,
        tiers=given.tiers,
    )
    print(as_yaml(options), end="")  # noqa: T201 - this is what the command is for


if __name__ == "__main__":
    main()
