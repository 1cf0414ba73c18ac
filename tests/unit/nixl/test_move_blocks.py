"""Blocks moved by real NIXL: every byte where it belongs, and a result for each block."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.transfer import Buffer, blocks_of, moves_between, open_file

from commutator.contract.tier import Direction, Memory, Region, Span
from commutator.errors import TransferCancelledError, TransferError, TransferTimeoutError
from commutator_engine_kit.nixl.agent import Transfer, TransferAgent, TransferPath
from commutator_engine_kit.nixl.moves import BlockMove, MoveLimits, move_blocks

MIB = 1 << 20
BLOCK = MIB // 2
COUNT = 32

Move = Callable[..., list[TransferError | None]]


@pytest.fixture
def move(agent: TransferAgent) -> Move:
    """``move_blocks`` between memory and files, in small batches so that there are many."""

    def run(direction: Direction, moves: list[BlockMove], **options: Any) -> Any:
        remote = options.pop("remote_memory", Memory.FILE), options.pop("backend", "POSIX")
        on_done = options.pop("on_done", lambda _: None)
        limits = {"timeout_s": 10, "batch_bytes": 2 * MIB, "max_in_flight_bytes": 4 * MIB}
        path = TransferPath(direction, Memory.DRAM, *remote)
        return move_blocks(agent, path, moves, MoveLimits(**{**limits, **options}), on_done)

    return run


@pytest.fixture
def late(agent: TransferAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """No transfer is done at its first check, which on a busy machine may come late enough."""
    check, checked = agent._nixl.check_xfer_state, list[Any]()

    def state(handle: Any) -> Any:
        if any(handle is other for other in checked):
            return check(handle)
        checked.append(handle)
        return "PROC"

    monkeypatch.setattr(agent._nixl, "check_xfer_state", state)


def shuffled(spans: list[Span]) -> list[Span]:
    return spans[1::2] + spans[0::2]


@pytest.mark.parametrize("prepared", [False, True])
def test_memory_to_memory(
    agent: TransferAgent, memory: Buffer, move: Move, *, prepared: bool
) -> None:
    source = Buffer(memory.size_bytes)
    source.fill(1)
    agent.register([source.region], "UCX")
    if prepared:
        agent.prepare(Memory.DRAM, memory.span, BLOCK, "UCX")
        agent.prepare(Memory.DRAM, source.span, BLOCK, "UCX")
    # Blocks out of order stay single, so that prepared lists are used where there are some.
    moves = moves_between(memory.blocks(BLOCK), shuffled(source.blocks(BLOCK)))
    results = move(Direction.READ, moves, remote_memory=Memory.DRAM, backend="UCX")
    assert results == [None] * COUNT
    expected = b"".join(
        source.bytes[span.address - source.address :][:BLOCK]
        for span in shuffled(source.blocks(BLOCK))
    )
    assert memory.bytes[:] == expected


@pytest.mark.parametrize("direct", [False, True])
def test_memory_to_a_file_and_back(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path, *, direct: bool
) -> None:
    memory.fill(2)
    before = memory.bytes[:]
    with open_file(tmp_path / "file", memory.size_bytes, direct=direct) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        moves = moves_between(memory.blocks(BLOCK), shuffled(blocks_of(file, BLOCK)))
        assert move(Direction.WRITE, moves) == [None] * COUNT
        written = (tmp_path / "file").read_bytes()
        for one in moves:
            start = one.local.address - memory.address
            assert written[one.remote.address :][:BLOCK] == before[start : start + BLOCK]
        memory.clear()
        assert move(Direction.READ, moves) == [None] * COUNT
        assert memory.bytes[:] == before
        agent.deregister([Region(memory=Memory.FILE, span=file)], "POSIX")


def test_regions_of_their_own_are_registered_for_the_move_alone(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path
) -> None:
    memory.fill(3)
    with open_file(tmp_path / "file", memory.size_bytes) as file:
        moves = [
            BlockMove(local, remote, Region(memory=Memory.FILE, span=remote))
            for local, remote in zip(memory.blocks(BLOCK), blocks_of(file, BLOCK), strict=True)
        ]
        assert move(Direction.WRITE, moves) == [None] * COUNT
        assert (tmp_path / "file").read_bytes() == memory.bytes[:]
        with pytest.raises(TransferError, match="not registered"):
            agent.deregister([Region(memory=Memory.FILE, span=moves[0].remote)], "POSIX")


@pytest.mark.parametrize("bad", [0, 7, COUNT - 1])
def test_one_bad_block_fails_alone(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path, bad: int
) -> None:
    content = os.urandom(memory.size_bytes)
    (tmp_path / "file").write_bytes(content)
    arrived: list[int] = []
    with open_file(tmp_path / "file", len(content), direct=True) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        gone = os.open(tmp_path / "file", os.O_RDWR)
        agent.register([Region(memory=Memory.FILE, span=Span(0, len(content), gone))], "POSIX")
        os.close(gone)
        remote = blocks_of(file, BLOCK)
        remote[bad] = Span(remote[bad].address, BLOCK, gone)
        moves = moves_between(memory.blocks(BLOCK), remote)
        results = move(Direction.READ, moves, on_done=arrived.extend)
    assert [index for index, error in enumerate(results) if error] == [bad]
    assert not isinstance(results[bad], TransferTimeoutError)
    good = sorted(set(range(COUNT)) - {bad})
    assert sorted(arrived) == good
    for index in good:
        start = index * BLOCK
        assert memory.bytes[start : start + BLOCK] == content[start : start + BLOCK]


def test_a_file_that_ends_early_fails_what_lies_beyond(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path
) -> None:
    with open_file(tmp_path / "file", memory.size_bytes) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        os.ftruncate(file.device, 5 * BLOCK + 4096)
        results = move(Direction.READ, moves_between(memory.blocks(BLOCK), blocks_of(file, BLOCK)))
    assert [error is None for error in results] == [True] * 5 + [False] * (COUNT - 5)


def test_a_block_that_is_not_registered_fails_alone(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path
) -> None:
    with open_file(tmp_path / "file", memory.size_bytes) as file:
        known = Region(memory=Memory.FILE, span=Span(0, memory.size_bytes - BLOCK, file.device))
        agent.register([known], "POSIX")
        results = move(Direction.READ, moves_between(memory.blocks(BLOCK), blocks_of(file, BLOCK)))
    assert [error is None for error in results] == [True] * (COUNT - 1) + [False]


@pytest.mark.usefixtures("late")
def test_never_more_under_way_than_allowed(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started: list[Transfer] = []
    under_way_bytes: list[int] = []
    start = agent.start

    def watched(*args: Any, **options: Any) -> Transfer:
        transfer = start(*args, **options)
        started.append(transfer)
        under_way = [each for each in started if not each._ended]
        spans = [span for each in under_way for span in each.request.local]
        under_way_bytes.append(sum(span.size_bytes for span in spans))
        return transfer

    monkeypatch.setattr(agent, "start", watched)
    (tmp_path / "file").write_bytes(os.urandom(memory.size_bytes))  # no holes: they cost no time
    with open_file(tmp_path / "file", memory.size_bytes, direct=True) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        results = move(Direction.READ, moves_between(memory.blocks(BLOCK), blocks_of(file, BLOCK)))
    assert results == [None] * COUNT
    assert len(started) == 8
    assert 2 * MIB < max(under_way_bytes) <= 4 * MIB


@pytest.mark.usefixtures("late")
def test_later_blocks_are_under_way_while_earlier_ones_are_handed_over(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path
) -> None:
    under_way: list[int] = []
    arrived: list[int] = []

    def on_done(indices: list[int]) -> None:
        arrived.extend(indices)
        under_way.append(len(agent._under_way))

    (tmp_path / "file").write_bytes(os.urandom(memory.size_bytes))  # no holes: they cost no time
    with open_file(tmp_path / "file", memory.size_bytes, direct=True) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        moves = moves_between(memory.blocks(BLOCK), blocks_of(file, BLOCK))
        move(Direction.READ, moves, on_done=on_done)
    assert sorted(arrived) == list(range(COUNT))
    assert under_way[0] > 0
    assert under_way[-1] == 0


def test_no_time_left_means_nothing_is_begun(
    agent: TransferAgent, memory: Buffer, move: Move
) -> None:
    spans = memory.blocks(BLOCK)
    moves = moves_between(spans[:4], spans[4:8])
    results = move(Direction.READ, moves, remote_memory=Memory.DRAM, backend="UCX", timeout_s=0)
    assert all(isinstance(error, TransferTimeoutError) for error in results)
    assert [error.token for error in results if isinstance(error, TransferTimeoutError)] == [
        None
    ] * 4


def test_cancelled_blocks_stay_pinned_until_they_are_reaped(
    agent: TransferAgent, memory: Buffer, move: Move, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    content = os.urandom(memory.size_bytes)
    (tmp_path / "file").write_bytes(content)
    with open_file(tmp_path / "file", memory.size_bytes, direct=True) as file:
        agent.register([Region(memory=Memory.FILE, span=file)], "POSIX")
        moves = moves_between(memory.blocks(BLOCK), blocks_of(file, BLOCK))
        with monkeypatch.context() as patch:
            # Otherwise the first blocks may have arrived before the cancellation is seen.
            patch.setattr(agent._nixl, "check_xfer_state", lambda _: "PROC")
            results = move(Direction.READ, moves, cancelled=lambda: bool(agent._under_way))
        assert all(isinstance(error, TransferCancelledError) for error in results)
        tokens = [error.token for error in results if isinstance(error, TransferCancelledError)]
        pinned = {token for token in tokens if token is not None}
        assert pinned
        reaped: set[int] = set()
        while reaped != pinned:
            reaped |= set(agent.reap())
        for index, token in enumerate(tokens):
            if token in pinned:  # It was not taken back: all of it has come.
                start = index * BLOCK
                assert memory.bytes[start : start + BLOCK] == content[start : start + BLOCK]


def test_nothing_to_move() -> None:
    agent = TransferAgent("idle", {})
    path = TransferPath(Direction.READ, Memory.DRAM, Memory.DRAM, "UCX")
    nothing = move_blocks(agent, path, [], MoveLimits(timeout_s=1))
    assert nothing == []
