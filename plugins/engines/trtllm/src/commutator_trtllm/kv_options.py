"""The KV connector's options. They come by environment: its section in the YAML file has no room.

TensorRT-LLM hands variables that begin with TLLM on to all its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import fields, frozen

from commutator.errors import ConfigError
from commutator.schema import ByteSize

__all__ = ["PREFIX", "KvOptions", "check_llm_args", "read_options"]

PREFIX = "TLLM_COMMUTATOR_"
_WHERE = "environment of the KV connector"


@frozen(kw_only=True)
class KvOptions:
    """Each is a variable: TLLM_COMMUTATOR_TIERS and so on."""

    tiers: str
    """A file with a `tiers:` section."""
    worker: str = "trtllm"
    """A name; no two servers may have the same at the same time."""
    staging: int = 1 << 30
    """Bytes of host memory in each rank, between the engine and the tiers."""
    wait_s: float = 0.05
    """So long a new request, and all others with it, may wait for its blocks."""


def read_options(environment: Mapping[str, str]) -> KvOptions:
    """Raises ConfigError with every mistake."""
    given = {
        name.removeprefix(PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(PREFIX)
    }
    known = {field.name for field in fields(KvOptions)}
    problems = [f"{PREFIX}{name.upper()} is not known" for name in sorted(given.keys() - known)]
    if not given.get("tiers"):
        problems.append(f"{PREFIX}TIERS is missing: a YAML file with a `tiers:` section")
    values: dict[str, Any] = {name: given[name] for name in known & given.keys()}
    for name, parse, expected in (
        ("staging", _size, ByteSize().describe()),
        ("wait_s", _seconds, "a number of seconds above 0"),
    ):
        if name in values:
            text = values[name]
            values[name] = parse(text)
            if values[name] is None:
                problems.append(f"{PREFIX}{name.upper()}: expected {expected}, got {text!r}")
    if problems:
        raise ConfigError(problems, _WHERE)
    return KvOptions(**values)


def check_llm_args(llm_args: Any) -> None:
    """Raises ConfigError for what would be wrong, or ignored without a word."""
    cache = llm_args.kv_cache_config
    problems = []
    if not cache.enable_block_reuse:
        problems.append("kv_cache_config: enable_block_reuse is off: nothing would be loaded")
    if getattr(cache, "max_attention_window", None):
        problems.append("kv_cache_config: max_attention_window: pages are given away in between")
    if getattr(llm_args, "context_parallel_size", 1) > 1:
        problems.append("context_parallel_size above 1 cuts up blocks in a way not known here")
    if problems:
        raise ConfigError(problems, "TensorRT-LLM with tiers")


def _size(text: str) -> int | None:
    return ByteSize().parse(int(text) if text.isdecimal() else text)


def _seconds(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < float("inf") else None
