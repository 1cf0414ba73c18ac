"""A worker whose memory others read is killed, or hangs: they go on, and borrow again later."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psutil
import pytest
from tests.support.oracle import SOURCE
from tests.support.shared_workers import WorkerProbe, cluster_of, introduce, worker_processes

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

TIERS: list[dict[str, Any]] = [
    {"kind": "dram", "capacity": "200MB"},
    {"kind": "peer", "ask_timeout_s": 1.0, "load_timeout_s": 2.0},
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with cluster_of(2, TIERS) as running:
        yield running


def prompt_of(subject: str) -> list[int]:
    text = f"There once was {subject}, of which many stories were told in the evening. " * 12
    return load_text_model(SOURCE).encode(text)


@pytest.mark.parametrize("known", [True, False], ids=["already lent", "not yet asked for"])
def test_kill(cluster: LocalCluster, known: bool) -> None:
    lender, borrower = WorkerProbe(cluster, 0), WorkerProbe(cluster, 1)
    introduce(borrower, lender)
    prompt = prompt_of(f"a worker that was killed ({known})")
    expected, _ = lender.answer_stored(prompt)
    if known:
        assert all("peer" in names for names in borrower.held_in(prompt))
    worker_processes(cluster)[lender.address].kill()
    tokens, cached = borrower.answer(prompt)
    assert tokens == expected
    assert cached == 0
    introduce(borrower, lender)


@pytest.mark.parametrize("known", [True, False], ids=["already lent", "not yet asked for"])
def test_hang(cluster: LocalCluster, known: bool) -> None:
    lender, borrower = WorkerProbe(cluster, 0), WorkerProbe(cluster, 1)
    introduce(borrower, lender)
    prompt = prompt_of(f"a worker that fell asleep ({known})")
    expected, _ = lender.answer_stored(prompt)
    if known:
        assert all("peer" in names for names in borrower.held_in(prompt))
    process = worker_processes(cluster)[lender.address]
    process.send_signal(signal.SIGSTOP)
    try:
        assert borrower.answer(prompt)[0] == expected
        for number in range(3):
            borrower.answer(prompt_of(f"a worker that was not waited for {number}"))
    finally:
        with suppress(psutil.NoSuchProcess):  # its agent has ended it
            process.send_signal(signal.SIGCONT)
    introduce(borrower, lender)
