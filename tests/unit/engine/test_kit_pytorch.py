"""Where engines in PyTorch compute, by their options."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commutator.errors import ConfigError
from commutator_engine_kit.pytorch import prepare_pytorch, threads_for


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("device", "dtype", "has_gpu", "expected"),
    [
        ("auto", "auto", False, ("cpu", torch.float32)),
        ("auto", "auto", True, ("cuda", torch.bfloat16)),
        ("cpu", "auto", True, ("cpu", torch.float32)),
        ("cuda", "float32", True, ("cuda", torch.float32)),
        ("cpu", "bfloat16", False, ("cpu", torch.bfloat16)),
    ],
)
def test_device_and_format(
    device: Any,
    dtype: Any,
    has_gpu: bool,
    expected: tuple[str, torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found = prepare_pytorch(device, dtype, threads=1, replicas=1, where="here")
    assert (found[0].type, found[1]) == expected


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch finds no GPU"):
        prepare_pytorch("cuda", "auto", threads=1, replicas=1, where="here")


@pytest.mark.parametrize(
    ("threads", "replicas", "expected"), [(3, 1, 3), (None, 4, 2), (None, 99, 1)]
)
def test_workers_share_the_cores(
    threads: int | None, replicas: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    prepare_pytorch("cpu", "auto", threads=threads, replicas=replicas, where="here")
    assert torch.get_num_threads() == expected


def test_one_thread_computes_what_is_short_and_all_what_is_long() -> None:
    assert [threads_for(tokens, 8) for tokens in (1, 32, 33, 4_096)] == [1, 1, 8, 8]
    assert threads_for(4_096, 1) == 1
