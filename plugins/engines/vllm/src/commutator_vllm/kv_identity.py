"""What decides the bytes of a vLLM worker's KV blocks, beside the tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from commutator.engine.model_identity import model_facts, model_words
from commutator.kv import CacheIdentity

__all__ = ["cache_identity"]


def cache_identity(
    vllm_config: Any, *, layout: str, block_size: int, rank: str, version: str
) -> CacheIdentity:
    """``layout`` tells the shapes and orders of the worker's tensors; ``rank`` its part of them.

    Reads every byte of the weights, unless their directory's name is a commit.
    """
    model = vllm_config.model_config
    facts = {
        "model": model_facts(model.hf_config),
        "quantization": model.quantization,
        "speculative": repr(getattr(vllm_config.speculative_config, "method", None)),
        "vllm": version,
        "layout": layout,
    }
    words = json.dumps(facts, sort_keys=True, default=repr)
    is_random = str(vllm_config.load_config.load_format) == "dummy"
    seed = model.seed if is_random else None
    served = model_words(model.model, model.revision, model.tokenizer, random_seed=seed)
    return CacheIdentity(
        model="vllm",
        weights=served.weights,
        tokenizer=served.tokenizer,
        dtype=f"{model.dtype} {vllm_config.cache_config.cache_dtype}",
        layout=hashlib.sha256(words.encode()).hexdigest(),
        block_size=block_size,
        parallel_rank=rank,
    )
