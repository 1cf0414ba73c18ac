"""vLLM's groups of KV layers, as the tiers know them.

vLLM gives each layer a specification of its KV, and layers that share a block table are a group.
All groups take their blocks from one pool, so a block belongs to one group at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from commutator.errors import ConfigError
from commutator_engine_kit.kv import KvGroup, KvKind

_KINDS = {
    "FullAttentionSpec": KvKind.FULL,
    "MLAAttentionSpec": KvKind.LATENT,
    "SlidingWindowSpec": KvKind.SLIDING,
    "SlidingWindowMLASpec": KvKind.SLIDING,
    "ChunkedLocalAttentionSpec": KvKind.CHUNKED,
    "MambaSpec": KvKind.RECURRENT,
}
"""By the name of the class of a layer's specification. Others share no prefix, or hold more than
the tokens say (cross attention, sinks in blocks of their own, rings, replicas on the host)."""


def groups_of(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """The groups of a KVCacheConfig, in vLLM's order. Raises ConfigError for those it refuses."""
    if problems := list(group_problems(kv_cache_config)):
        raise ConfigError(problems, "vLLM's KV cache")
    return tuple(_group(group) for group in kv_cache_config.kv_cache_groups)


def group_problems(kv_cache_config: Any) -> Iterator[str]:
    """Why the tiers cannot keep this model's KV."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        yield "the model has no KV cache"
    for number, group in enumerate(groups):
        specs = _specs(group)
        names = sorted({type(spec).__name__ for spec in specs})
        if unknown := [name for name in names if name not in _KINDS]:
            yield f"group {number}: layers with {', '.join(unknown)} are not supported"
            continue
        if len({(_KINDS[type(spec).__name__], _window(spec)) for spec in specs}) > 1:
            yield f"group {number}: its layers differ: {', '.join(names)}"
        for mode in {getattr(spec, "mamba_cache_mode", "align") for spec in specs} - {"align"}:
            yield f"group {number}: states need --mamba-cache-mode align, not {mode}"
        if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
            yield f"group {number}: its blocks are not in the pool of the other groups"


def _group(group: Any) -> KvGroup:
    spec = group.kv_cache_spec
    first = _specs(group)[0]
    return KvGroup(
        kind=_KINDS[type(first).__name__],
        block_size=spec.block_size,
        window=_window(first),
        layers=tuple(sorted(group.layer_names)),
        block_bytes=spec.page_size_bytes * (1 if _is_uniform(spec) else len(group.layer_names)),
    )


def _specs(group: Any) -> Sequence[Any]:
    spec = group.kv_cache_spec
    return list(spec.kv_cache_specs.values()) if _is_uniform(spec) else [spec]


def _is_uniform(spec: Any) -> bool:
    """Whether it only says that its layers, of one type, have specifications of their own."""
    return hasattr(spec, "kv_cache_specs")


def _window(spec: Any) -> int:
    match _KINDS.get(type(spec).__name__):
        case KvKind.SLIDING:
            # Blocks of some tokens before the window are kept for draft layers.
            return int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
        case KvKind.CHUNKED:
            return int(spec.attention_chunk_size)
        case _:
            return 0
