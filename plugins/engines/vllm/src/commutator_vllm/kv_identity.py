"""What decides the bytes of a vLLM worker's KV blocks, beside the tokens."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import xxhash

from commutator.kv import CacheIdentity

__all__ = ["cache_identity", "weights_revision"]

_READ_BYTES = 8 << 20
_OF_THE_MACHINE = {"_name_or_path", "transformers_version"}
"""Entries of a model's configuration that change no byte of its blocks."""


def cache_identity(
    vllm_config: Any, *, layout: str, block_size: int, rank: str, version: str
) -> CacheIdentity:
    """``layout`` tells the shapes and orders of the worker's tensors; ``rank`` its part of them.

    Reads every byte of the weights, unless their directory's name is a commit.
    """
    model = vllm_config.model_config
    facts = {
        "model": {
            name: value
            for name, value in model.hf_config.to_dict().items()
            if name not in _OF_THE_MACHINE
        },
        "quantization": model.quantization,
        "speculative": repr(getattr(vllm_config.speculative_config, "method", None)),
        "vllm": version,
        "layout": layout,
    }
    words = json.dumps(facts, sort_keys=True, default=repr)
    weights = weights_revision(model, str(vllm_config.load_config.load_format))
    return CacheIdentity(
        model="vllm",
        weights=weights,
        tokenizer=f"{weights} {model.tokenizer}" if model.tokenizer != model.model else weights,
        dtype=f"{model.dtype} {vllm_config.cache_config.cache_dtype}",
        layout=hashlib.sha256(words.encode()).hexdigest(),
        block_size=block_size,
        parallel_rank=rank,
    )


def weights_revision(model: Any, load_format: str = "auto") -> str:
    """The commit of a snapshot in Hugging Face's cache, or a digest of the model's files."""
    path = Path(model.model)
    if not path.is_dir():
        path = _snapshot(model)
    drawn = f" random by {model.seed}" if load_format == "dummy" else ""
    return (path.name if path.parent.name == "snapshots" else _digest(path)) + drawn


def _snapshot(model: Any) -> Path:
    from huggingface_hub import snapshot_download  # noqa: PLC0415 - vLLM brings it

    return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))


def _digest(path: Path) -> str:
    state = xxhash.xxh3_128()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        state.update(f"{file.relative_to(path)}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                state.update(piece)
    return state.hexdigest()
