"""The cache identity of a vLLM worker, its rank, and the name of its tiers."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from commutator.contract.block import CacheIdentity
from commutator_engine_kit.model_identity import model_facts, served_identity

__all__ = ["cache_identity", "is_first_rank", "worker_of"]


def cache_identity(config: Any, layout: str, block_size: int) -> CacheIdentity:
    """The identity for a VllmConfig; ``layout`` describes the worker's tensors.

    Hashes all weights, unless the name of their directory is a commit.
    """
    model, parallel = config.model_config, config.parallel_config
    is_random = str(config.load_config.load_format) == "dummy"
    tensor = f"{get_tensor_model_parallel_rank()}/{parallel.tensor_parallel_size}"
    pipeline = f"{get_pp_group().rank_in_group}/{parallel.pipeline_parallel_size}"
    return served_identity(
        "vllm",
        model=model.model,
        revision=model.revision,
        tokenizer=model.tokenizer,
        random_seed=model.seed if is_random else None,
        dtype=f"{model.dtype} {config.cache_config.cache_dtype}",
        facts={
            "model": model_facts(model.hf_config),
            "quantization": model.quantization,
            "speculative": repr(getattr(config.speculative_config, "method", None)),
            "vllm": vllm.__version__,
            "layout": layout,
        },
        block_size=block_size,
        parallel_rank=f"tensor {tensor} pipeline {pipeline}",
    )


def is_first_rank() -> bool:
    """Whether this rank reports KV events; those of the other ranks are the same."""
    return bool(get_tensor_model_parallel_rank() == get_pp_group().rank_in_group == 0)


def worker_of(name: str, config: Any) -> str:
    """The worker name ``name`` with the rank added: each rank has its own tiers."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        name += f"-dp{parallel.data_parallel_rank}"
    if parallel.world_size > 1:
        name += f"-tp{get_tensor_model_parallel_rank()}-pp{get_pp_group().rank_in_group}"
    return name
