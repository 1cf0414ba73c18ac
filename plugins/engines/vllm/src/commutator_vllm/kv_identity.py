"""What decides the bytes of a vLLM worker's KV blocks, beside the tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from commutator.engine import weights_revision
from commutator.kv import CacheIdentity

__all__ = ["cache_identity"]

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
    weights = weights_revision(model.model, model.revision)
    if str(vllm_config.load_config.load_format) == "dummy":
        weights += f" random by {model.seed}"
    return CacheIdentity(
        model="vllm",
        weights=weights,
        tokenizer=f"{weights} {model.tokenizer}" if model.tokenizer != model.model else weights,
        dtype=f"{model.dtype} {vllm_config.cache_config.cache_dtype}",
        layout=hashlib.sha256(words.encode()).hexdigest(),
        block_size=block_size,
        parallel_rank=rank,
    )
