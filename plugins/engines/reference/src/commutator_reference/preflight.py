"""What a reference worker needs of its machine, found out before a process is started.

PyTorch is imported only by a program of its own, and only where a GPU is asked for: loading it
takes seconds.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from commutator import ModelConfig, TierConfig
from commutator.errors import ConfigError
from commutator.tokenizer import locate_model
from commutator_engine_kit.preflight import machine_memory_bytes
from commutator_engine_kit.preflight import size_text as _size
from commutator_reference.config import ReferenceConfig
from commutator_reference.llama import LlamaConfig, read_config

_LOOK_FOR_GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"
_TORCH_TIMEOUT_S = 120


def missing_for_handover(*, prefix_caching: bool) -> str | None:
    """Why a worker cannot hand KV over, and what to do; None if it can."""
    if not prefix_caching:
        return "prefix_caching is off, and handed-over blocks arrive in the prefix cache: set it"
    if not _has_nixl():
        return f"NIXL, which moves all KV, is not installed: {_INSTALL_NIXL}"
    return None


_INSTALL_NIXL = "pip install 'nixl[cu12]'"


def _has_nixl() -> bool:
    return find_spec("nixl") is not None or find_spec("nixl_cu12") is not None


def problems(
    config: ReferenceConfig, model: ModelConfig, tiers: Sequence[TierConfig]
) -> Iterator[str]:
    """As ``EngineConnector.problems``."""
    if find_spec("torch") is None:
        yield "kind: PyTorch is not installed; pip install torch"
        return
    if config.device == "cuda" and not _has_gpu():
        yield "device: cuda is configured, but PyTorch finds no GPU; set device: cpu"
        return
    on_cpu = config.device != "cuda"
    missing = missing_for_handover(prefix_caching=config.prefix_caching)
    if config.role != "both" and missing is not None:
        yield f"role: {config.role} needs a hand-over: {missing}"
    if tiers and not _has_nixl():
        yield f"kind: NIXL, which moves KV to and from `tiers`, is not installed; {_INSTALL_NIXL}"
    llama = model_config(model.source)
    if llama is None:
        return
    bytes_each = number_bytes(config)
    least = llama.kv_bytes(config.block_size, bytes_each)
    if config.kv_cache_bytes < least:
        yield (
            f"kv_cache_bytes: {_size(config.kv_cache_bytes)} hold not even one KV block; set it "
            f"to {_size(_rounded_up(llama.kv_bytes(_context(llama, model), bytes_each)))} for "
            f"the model's {_context(llama, model):,} tokens"
        )
    yield from _tier_problems(tiers, least)
    if on_cpu and config.kv_cache_bytes >= least:
        yield from _memory_problems(config, llama.least_parameters * bytes_each)


def _tier_problems(tiers: Sequence[TierConfig], least: int) -> Iterator[str]:
    """Tiers that hold no block of ``least`` bytes, which workers would open again for ever."""
    for number, tier in enumerate(tiers):
        capacity = getattr(tier, "capacity", None)
        if isinstance(capacity, int) and capacity < least:
            yield (
                f"tiers[{number}].capacity: {_size(capacity)} hold not even one KV block of this "
                f"model ({_size(least)}); give it room for many"
            )


def _memory_problems(config: ReferenceConfig, weights_bytes: int) -> Iterator[str]:
    total_bytes = machine_memory_bytes()
    if total_bytes is None:
        return
    problem = memory_problem(
        kv_bytes=config.kv_cache_bytes,
        weights_bytes=weights_bytes,
        replicas=config.replicas,
        total_bytes=total_bytes,
    )
    if problem is not None:
        yield problem


def warnings(config: ReferenceConfig, model: ModelConfig) -> Iterator[str]:
    """As ``EngineConnector.warnings``."""
    llama = model_config(model.source)
    if llama is None:
        return
    bytes_each, context = number_bytes(config), _context(llama, model)
    block_bytes = llama.kv_bytes(config.block_size, bytes_each)
    tokens = config.kv_cache_bytes // block_bytes * config.block_size
    if tokens < context:
        blocks = -(-context // config.block_size)
        yield (
            f"kv_cache_bytes: {_size(config.kv_cache_bytes)} limits the context to {tokens:,} "
            f"tokens; the model's full {context:,} need {_size(_rounded_up(blocks * block_bytes))}"
        )


def memory_problem(
    *, kv_bytes: int, weights_bytes: int, replicas: int, total_bytes: int
) -> str | None:
    """Why workers of these sizes cannot be in ``total_bytes`` of memory, and what would fit."""
    if replicas * (kv_bytes + weights_bytes) <= total_bytes:
        return None
    each = "" if replicas == 1 else f" for each of {replicas} workers"
    needs = (
        f"kv_cache_bytes: {_size(kv_bytes)}{each}, beside at least {_size(weights_bytes)} of "
        f"weights, is more than this machine's {_size(total_bytes)} of memory"
    )
    fits_bytes = total_bytes // replicas - weights_bytes
    if fits_bytes < _MB:
        return f"{needs}, which does not even hold the weights; use fewer replicas"
    return f"{needs}; set it to at most {_size(fits_bytes // _MB * _MB)}"


def model_config(source: str) -> LlamaConfig | None:
    """The configuration of the model at ``source``; None if there is none, or no Llama model.

    Loading such a model raises an error that says what is wrong with it.
    """
    try:
        path = locate_model(source)
        file = path if path.is_file() else path / "config.json"
        return _config_at(path, file.stat().st_mtime_ns)
    except (ConfigError, OSError, TypeError, ValueError, ZeroDivisionError):
        return None


@cache
def _config_at(path: Path, _changed_ns: int) -> LlamaConfig:
    """Read once, although problems and warnings ask for each entry: vocabularies are long."""
    return read_config(path)


@cache
def _has_gpu() -> bool:
    """Also where PyTorch takes too long to tell: then the worker itself finds out."""
    try:
        done = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, "-c", _LOOK_FOR_GPU],
            capture_output=True,
            check=False,
            timeout=_TORCH_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return True
    return done.returncode == 0


def _context(llama: LlamaConfig, model: ModelConfig) -> int:
    return min(model.max_model_len or llama.context_length, llama.context_length)


def number_bytes(config: ReferenceConfig) -> int:
    """Bytes of a weight or a number of the KV cache; `auto` on a GPU takes fewer than assumed."""
    is_half = config.dtype == "bfloat16" or (config.dtype == "auto" and config.device == "cuda")
    return 2 if is_half else 4


_MB = 10**6


def _rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // _MB) * _MB
