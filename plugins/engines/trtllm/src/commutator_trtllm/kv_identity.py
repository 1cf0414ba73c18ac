"""What decides the bytes of a TensorRT-LLM worker's KV blocks, beside the tokens."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from commutator.engine.model_identity import model_words
from commutator.kv import CacheIdentity

__all__ = ["cache_identity"]


def cache_identity(
    llm_args: Any, *, layout: str, block_size: int, rank: int, version: str
) -> CacheIdentity:
    """``layout`` tells a block's pieces. Reads every byte of the weights, as weights_revision.

    TensorRT-LLM's options are taken as they print, so that unknown ones only ever lead to misses.
    """
    model = str(llm_args.model)
    facts = {
        "tensorrt_llm": version,
        "layout": layout,
        "quantization": repr(getattr(llm_args, "quant_config", None)),
        "attention": repr(getattr(llm_args, "attn_backend", None)),
        "load_format": repr(getattr(llm_args, "load_format", None)),
    }
    tokenizer = llm_args.tokenizer if isinstance(llm_args.tokenizer, str) else None
    served = model_words(model, getattr(llm_args, "revision", None), tokenizer)
    return CacheIdentity(
        model="tensorrt_llm",
        weights=served.weights,
        tokenizer=served.tokenizer,
        dtype=f"{llm_args.dtype} {llm_args.kv_cache_config.dtype}",
        layout=hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest(),
        block_size=block_size,
        parallel_rank=f"tensor {rank}/{llm_args.tensor_parallel_size}",
    )
