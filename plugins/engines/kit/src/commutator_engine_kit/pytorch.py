"""Where and how an engine in PyTorch computes: threads, device, number format."""

from __future__ import annotations

import os
from typing import Literal

import torch

from commutator.errors import ConfigError

__all__ = ["prepare_pytorch", "threads_for"]

_TOKENS_OF_ONE_THREAD = 32
"""Two threads compute as many tokens of a small model 15 % sooner where nothing else runs, and five
times later where something does: each waits, spinning, for the other at every operation."""


def prepare_pytorch(
    device: Literal["auto", "cpu", "cuda"],
    dtype: Literal["auto", "float32", "bfloat16"],
    *,
    threads: int | None,
    replicas: int,
    where: str,
) -> tuple[torch.device, torch.dtype]:
    """The device and the format of weights, as an engine's options of these names have it.

    Sets PyTorch's CPU threads: without ``threads``, the cores shared among the workers of the
    entry. ``auto``: a GPU if there is one, and there bfloat16; float32 on a CPU. ``where`` names
    the engine in errors. Raises ConfigError where a GPU is asked for and there is none.
    """
    fair_threads = max(1, (os.cpu_count() or 1) // replicas)
    torch.set_num_threads(threads or fair_threads)
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError(["device: cuda is configured, but PyTorch finds no GPU"], where)
    chosen = torch.device("cuda" if has_gpu else "cpu")
    if dtype == "auto":
        return chosen, torch.bfloat16 if has_gpu else torch.float32
    return chosen, torch.float32 if dtype == "float32" else torch.bfloat16


def threads_for(tokens: int, most: int) -> int:
    """How many of ``most`` CPU threads compute a batch of so many tokens best: one, or all.

    One where there is little to divide. The caller passes it to ``torch.set_num_threads`` in the
    thread that computes.
    """
    return 1 if tokens <= _TOKENS_OF_ONE_THREAD else most
