"""A vLLM worker's memory and place: its tensors as blocks, its rank, what its device has done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank

from commutator.errors import ConfigError
from commutator.kv import BlockPart, ScatteredArena
from commutator.transfer import Memory
from commutator_vllm.kv_layout import block_parts, dimensions
from commutator_vllm.kv_worker import Fence

__all__ = ["arena_of", "cuda_fence", "is_first_rank", "no_fence", "rank_of", "worker_of"]


def arena_of(caches: dict[str, Any], blocks: int) -> tuple[ScatteredArena, str]:
    """The workers' tensors as blocks, and their shapes in words. Layers may share a tensor."""
    parts: dict[int, list[BlockPart]] = {}
    words = []
    for name, cache in sorted(caches.items()):
        if not isinstance(cache, torch.Tensor):
            raise ConfigError([f"layer {name} does not keep keys and values"], "vLLM's KV cache")
        pieces = block_parts(
            cache.data_ptr(), cache.shape, cache.stride(), cache.element_size(), blocks
        )
        parts.setdefault(cache.data_ptr(), pieces)
        sizes = [(part.size_bytes, cache.dtype) for part in pieces]
        words.append(f"{name} {dimensions(cache.shape, cache.stride(), blocks)} {sizes}")
    first = next(iter(caches.values()))
    on_cpu = first.device.type == "cpu"
    if on_cpu:  # the order within a block depends on the instructions that attention uses
        amx = torch.cpu._is_amx_tile_supported()  # noqa: SLF001 - nothing public tells
        words.append(f"{torch.backends.cpu.get_cpu_capability()} amx={amx}")
    arena = ScatteredArena(
        memory=Memory.DRAM if on_cpu else Memory.VRAM,
        parts=tuple(part for pieces in parts.values() for part in pieces),
        count=blocks,
        device=first.device.index or 0,
    )
    return arena, "; ".join(words)


def is_first_rank() -> bool:
    """All ranks have the same to tell."""
    return bool(get_tensor_model_parallel_rank() == get_pp_group().rank_in_group == 0)


def rank_of(config: Any) -> str:
    """Which part of each block this worker has."""
    parallel = config.parallel_config
    tensor = f"{get_tensor_model_parallel_rank()}/{parallel.tensor_parallel_size}"
    pipeline = f"{get_pp_group().rank_in_group}/{parallel.pipeline_parallel_size}"
    return f"tensor {tensor} pipeline {pipeline}"


def worker_of(name: str, config: Any) -> str:
    """Each rank has tiers of its own."""
    parallel = config.parallel_config
    if parallel.data_parallel_size > 1:
        name += f"-dp{parallel.data_parallel_rank}"
    if parallel.world_size > 1:
        name += f"-tp{get_tensor_model_parallel_rank()}-pp{get_pp_group().rank_in_group}"
    return name


def no_fence() -> Fence:
    """On a CPU a step has been computed when it returns."""
    return lambda: True


def cuda_fence() -> Fence:
    """What was launched on this thread's stream until now."""
    event = torch.cuda.Event()
    event.record()
    done: Callable[[], bool] = event.query
    return done
