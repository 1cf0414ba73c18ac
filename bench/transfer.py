"""Moving blocks of 1 MiB: ``move_blocks``, without and with checksums, against bare NIXL calls."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from attrs import frozen

from bench.result import Figure
from commutator.contract.tier import Direction, Memory, Region, Span
from commutator_engine_kit.kv.arena import BlockArena, bytes_at, checksum
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.library import make_agent
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks

BLOCK_BYTES = 1 << 20
BLOCKS = 64
TOTAL_BYTES = BLOCKS * BLOCK_BYTES
ROUNDS = 15


@frozen
class Case:
    what: str
    direction: Direction
    remote: Region
    backend: str

    def remote_spans(self) -> list[Span]:
        span = self.remote.span
        return [
            Span(span.address + index * BLOCK_BYTES, BLOCK_BYTES, span.device)
            for index in range(BLOCKS)
        ]


def run() -> list[Figure]:
    ours, theirs = memory(), memory()
    local = BlockArena(
        memory=Memory.DRAM, address=ours.address, block_bytes=BLOCK_BYTES, count=BLOCKS
    )
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(1) as checker:
        descriptor = os.open(Path(folder) / "segment", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, TOTAL_BYTES)
            file = Region(memory=Memory.FILE, span=Span(0, TOTAL_BYTES, descriptor))
            dram = Region(memory=Memory.DRAM, span=theirs)
            cases = [
                Case("DRAM to DRAM", Direction.READ, dram, "UCX"),
                Case("DRAM to file, O_DIRECT", Direction.WRITE, file, "POSIX"),
                Case("file to DRAM, O_DIRECT", Direction.READ, file, "POSIX"),
            ]
            return [figure for case in cases for figure in measure(case, local, checker)]
        finally:
            os.close(descriptor)


def measure(case: Case, local: BlockArena, checker: ThreadPoolExecutor) -> list[Figure]:
    """In turns, so that whatever else the machine does meets all three alike."""
    regions = [local.region, case.remote]
    raw = make_agent("raw")
    raw.create_backend(case.backend, {})
    for region in regions:
        described = (region.span.address, region.span.size_bytes, region.span.device, "")
        raw.register_memory([described], str(region.memory), [case.backend])
    agent = TransferAgent("ours", {case.backend: {}})
    agent.register(regions, case.backend)
    ways: list[Callable[[], None]] = [
        lambda: move_raw(raw, case, local),
        lambda: move_ours(agent, case, local, lambda _: None),
        lambda: move_checked(agent, case, local, checker),
    ]
    for way in ways:
        way()
    taken_s: list[list[float]] = [[], [], []]
    for _ in range(ROUNDS):
        for way, taken in zip(ways, taken_s, strict=True):
            started_s = time.perf_counter()
            way()
            taken.append(time.perf_counter() - started_s)
    agent.close()
    rates = [TOTAL_BYTES / statistics.median(taken) / 1e9 for taken in taken_s]
    return [
        Figure("transfer", case.what, rates[1], rates[0], "GB/s", "bare NIXL", ">= 0.98"),
        Figure(
            "transfer", f"{case.what}, checksums on", rates[2], rates[0], "GB/s", "bare NIXL",
            ">= 0.9",
        ),
    ]  # fmt: skip


def move_raw(raw: Any, case: Case, local: BlockArena) -> None:
    """One request for all blocks, asked after without a pause: the least that NIXL can be given."""
    ours = [(local.address + index * BLOCK_BYTES, BLOCK_BYTES, 0) for index in range(BLOCKS)]
    theirs = [(span.address, span.size_bytes, span.device) for span in case.remote_spans()]
    handle = raw.initialize_xfer(
        str(case.direction),
        raw.get_xfer_descs(ours, "DRAM"),
        raw.get_xfer_descs(theirs, str(case.remote.memory)),
        "raw", b"", [case.backend],
    )  # fmt: skip
    state = raw.transfer(handle)
    while state == "PROC":
        state = raw.check_xfer_state(handle)
    handle.release()
    if state != "DONE":
        raise RuntimeError(f"bare NIXL: {state}")


def move_ours(
    agent: TransferAgent, case: Case, local: BlockArena, on_done: Callable[[Sequence[int]], None]
) -> None:
    moves = [
        BlockMove(local.span(index), remote) for index, remote in enumerate(case.remote_spans())
    ]
    results = move_blocks(
        agent,
        TransferPath(case.direction, Memory.DRAM, case.remote.memory, case.backend),
        moves,
        MoveLimits(timeout_s=60),
        on_done,
    )
    for error in results:
        if error is not None:
            raise error


def move_checked(
    agent: TransferAgent, case: Case, local: BlockArena, checker: ThreadPoolExecutor
) -> None:
    """Blocks that have arrived are summed on a second thread, while later ones move."""
    sums: list[Future[list[int]]] = []

    def add(indices: Sequence[int]) -> None:
        sums.append(
            checker.submit(lambda: [checksum(bytes_at(local.span(index))) for index in indices])
        )

    move_ours(agent, case, local, add)
    if sum(len(each.result()) for each in sums) != BLOCKS:
        raise RuntimeError("blocks without a checksum")


_kept: list[mmap.mmap] = []


def memory() -> Span:
    """Page-aligned, touched, and kept until the process ends."""
    made = mmap.mmap(-1, TOTAL_BYTES)
    made[:] = random.Random(0).randbytes(TOTAL_BYTES)
    _kept.append(made)
    return Span(ctypes.addressof(ctypes.c_char.from_buffer(made)), TOTAL_BYTES)
