"""The options of a server: its YAML file, and the environment of its KV connector.

``python -m commutator_trtllm.options`` prints the file. The connector's section in it takes no
options of ours; but TensorRT-LLM passes variables that begin with TLLM to all its ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import yaml
from attrs import frozen

from commutator import PositiveSeconds, Size
from commutator.errors import ConfigError
from commutator.schema import StructureError, build_converter, structure

Role = Literal["both", "prefill", "decode"]

PREFIX = "TLLM_COMMUTATOR_"
_WHERE = "environment of the KV connector"

_EVENT_BUFFER = 65536
"""Events that the server buffers until the sidecar fetches them, several times a second."""

_KV_CONNECTOR = {
    # A block that is partly reused could not be loaded.
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
    """The server options that the connector needs, overridden by ``laid_over``.

    ``max_model_len`` is in tokens and sizes the buffer of the cache transceiver. ``tiers`` adds our
    KV connector, which reads its own options from the environment.
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
        options["disable_overlap_scheduler"] = True  # context servers do not support it
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


@frozen(kw_only=True)
class KvOptions:
    """Each field is an environment variable: TLLM_COMMUTATOR_TIERS and so on."""

    tiers: str
    """A file with a `tiers:` section."""
    worker: str = "trtllm"
    """The server's name, unique among running servers."""
    staging: Size = 1 << 30
    """Bytes of host memory in each rank, between the engine and the tiers."""
    wait_s: PositiveSeconds = 0.05
    """Seconds that a new request, and all others with it, may wait for its blocks."""


def read_options(environment: Mapping[str, str]) -> KvOptions:
    """The options in ``environment``. Raises ConfigError with all problems."""
    given: dict[str, Any] = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    if given.get("staging", "").isdecimal():
        given["staging"] = int(given["staging"])
    with suppress(KeyError, ValueError):
        given["wait_s"] = float(given["wait_s"])
    try:
        return structure(build_converter(), given, KvOptions)
    except StructureError as error:
        problems = [f"{PREFIX}{name.upper()}: {text}" for name, text in error.problems]
        raise ConfigError(problems, _WHERE) from None


def check_llm_args(llm_args: Any) -> None:
    """Raises ConfigError for settings that are unsupported or would be ignored."""
    cache = llm_args.kv_cache_config
    problems = []
    if not cache.enable_block_reuse:
        problems.append("kv_cache_config: turn on enable_block_reuse, which the tiers need")
    if getattr(cache, "max_attention_window", None):
        problems.append("kv_cache_config: max_attention_window is not supported; remove it")
    if getattr(llm_args, "context_parallel_size", 1) > 1:
        problems.append("context_parallel_size above 1 is not supported")
    if problems:
        raise ConfigError(problems, "TensorRT-LLM with tiers")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m commutator_trtllm.options",
        description="Prints the options that trtllm-serve needs, for --extra_llm_api_options.",
    )
    parser.add_argument("--role", choices=("both", "prefill", "decode"), default="both")
    parser.add_argument("--max-model-len", type=int, help="longest prompt plus answer, in tokens")
    parser.add_argument("--no-kv-events", action="store_true", help="do not publish KV events")
    parser.add_argument("--tiers", action="store_true", help="store KV blocks in storage tiers")
    given = parser.parse_args()
    options = server_options(
        given.role,
        kv_events=not given.no_kv_events,
        max_model_len=given.max_model_len,
        tiers=given.tiers,
    )
    print(as_yaml(options), end="")  # noqa: T201 - the output of the command


if __name__ == "__main__":
    main()
