"""What decides the bytes of this engine's KV blocks, beside the tokens."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash

from commutator.kv import CacheIdentity
from commutator_reference.llama_config import LlamaConfig

__all__ = ["cache_identity"]

_READ_BYTES = 8 << 20


def cache_identity(
    name: str, path: Path, config: LlamaConfig, *, block_size: int, dtype: torch.dtype
) -> CacheIdentity:
    """The identity of blocks computed from the weights at ``path``, without adapter and salt.

    Reads every byte of the weights: two fine-tunes may differ in a single tensor.
    """
    digest = _digest(path)
    return CacheIdentity(
        model=name,
        weights=digest,
        tokenizer=digest,  # the tokenizer lies in the same file or directory
        dtype=str(dtype).removeprefix("torch."),
        layout=(
            f"reference-1: {config.num_layers} layers, key and value, "
            f"{config.num_kv_heads} heads, {block_size} tokens, {config.head_size}"
        ),
        block_size=block_size,
    )


def _digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    state = xxhash.xxh3_128()
    for file in files:
        name = str(file.relative_to(path)) if path.is_dir() else ""
        state.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                state.update(piece)
    return state.hexdigest()
