"""A front door that starts asks another one what the caches hold, which may fail it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.unit.routing.fake_engine import HASHES, SIZE, info, stored, until

from commutator.contract.routing import Overlap, RouterConfig, WorkerRank
from commutator.contract.worker import WorkerRecord
from commutator.frames import pack
from commutator.routing.prefix_index.indexer import KvIndexer, WorkerSnapshot
from commutator.routing.prefix_index.snapshot import (
    CODECS,
    INDEX_SUFFIX,
    IndexFormat,
    IndexSharing,
    SnapshotCodec,
)
from commutator_engine_kit import EventPublisher

MODEL = "m/0"
SILENCE_S = 0.2
PATIENCE_S = 60.0
FORMAT = pack(["format", MODEL, IndexFormat.of(SIZE, max(CODECS))])


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    """An engine that keeps no more than its last two messages."""
    running = EventPublisher(keep_messages=2)
    yield running
    running.close()


@asynccontextmanager
async def view_of(block_size: int = SIZE) -> AsyncIterator[KvIndexer]:
    view = KvIndexer(RouterConfig(kind="kv", block_size=block_size))
    yield view
    await view.close()


@asynccontextmanager
async def informed(
    folder: Path, publisher: EventPublisher, *, serves: bool = True
) -> AsyncIterator[KvIndexer]:
    """A front door that runs, and has heard of a prompt of seven blocks, one after the other."""
    async with view_of() as view:
        await view.add(worker(publisher))
        for blocks in range(1, 8):
            publisher.publish([stored(blocks - 1, blocks)])
            await knows(view, blocks)
        sharing = IndexSharing({MODEL: view}, folder / f"old{INDEX_SUFFIX}")
        if serves:
            await sharing.serve()
        yield view
        await sharing.close()


def worker(publisher: EventPublisher) -> WorkerRecord:
    return WorkerRecord(
        worker_id="w",
        engine="e",
        kind="fake",
        model="m",
        address="127.0.0.1:1",
        info=info(publisher.source),
    )


async def knows(view: KvIndexer, blocks: int) -> None:
    await until(lambda: view.match(HASHES) == {WorkerRank("w"): Overlap(device=blocks)})


def beginner(
    folder: Path, view: KvIndexer, model: str = MODEL, silence_s: float = PATIENCE_S
) -> IndexSharing:
    return IndexSharing({model: view}, folder / f"new{INDEX_SUFFIX}", silence_s)


@asynccontextmanager
async def says(path: Path, parts: Sequence[bytes], *, ends: bool = True) -> AsyncIterator[None]:
    """A front door that says something else, and then hangs up or not."""

    async def tell(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.writelines(parts)
            if not ends:
                await silent.wait()
        finally:
            writer.close()

    silent = asyncio.Event()
    async with await asyncio.start_unix_server(tell, path):
        try:
            yield
        finally:
            silent.set()


async def test_it_knows_what_the_worker_cannot_repeat(
    tmp_path: Path, publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with informed(tmp_path, publisher) as old, view_of() as new, view_of() as alone:
        await beginner(tmp_path, new).start_warm()
        assert "old sent the prefix index of 1 workers, 7 blocks" in caplog.text
        await new.add(worker(publisher))
        assert new.index.snapshot("w") == old.index.snapshot("w") != []
        publisher.publish([stored(7, 8)])
        await knows(new, 8)
        await knows(old, 8)
        await alone.add(worker(publisher))
        await until(lambda: alone.index.statistics().orphans == 2)
        assert alone.match(HASHES) == {}, "the engine's memory is too short for this one"


async def test_of_several_that_run_the_first_that_answers_is_enough(
    tmp_path: Path, publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as left_over:
        left_over.bind(str(tmp_path / f"killed{INDEX_SUFFIX}"))
    hanging = tmp_path / f"hanging{INDEX_SUFFIX}"
    async with says(hanging, [], ends=False), informed(tmp_path, publisher), view_of() as new:
        (tmp_path / f"new{INDEX_SUFFIX}").touch()  # what it left when it was killed itself
        sharing = beginner(tmp_path, new, silence_s=2.0)
        await sharing.start_warm()
        assert [record.getMessage().split(" sent no")[0] for record in caplog.records] == [
            "hanging",
            "killed",
        ]
        await new.add(worker(publisher))
        await knows(new, 7)


async def test_one_that_is_no_index_like_ours_is_refused(
    tmp_path: Path, publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    async with informed(tmp_path, publisher), view_of(2 * SIZE) as new, view_of() as other:
        await beginner(tmp_path, new).start_warm()
        assert (
            "the prefix index of old for m/0 is ignored: it has IndexFormat(block_size=4"
            in caplog.text
        )
        await beginner(tmp_path, other, "another/0").start_warm()
        assert "there is no such model here" in caplog.text
        for view in (new, other):
            await view.add(worker(publisher))
            assert view.index.snapshot("w") == []


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ([b""], "0 bytes read"),
        ([b"HTTP/1.1 200 OK\r\n\r\n"], "a frame of 1213486160 bytes"),
        (
            [pack(["format", MODEL, {"block_size": SIZE, "version": 2}])],
            "missing required field `hash_check`",
        ),
        ([FORMAT, pack(["worker", MODEL, b"\x81\xa1x\x01"])], "missing required field `worker_id`"),
        ([FORMAT, pack(["worker", MODEL, b"\xc1"])], "malformed"),
        ([pack(["hello"])], "unknown frame ['hello']"),
        ([pack(["end"])[:-1]], "4 bytes"),
    ],
)
async def test_a_broken_snapshot_is_refused_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: list[bytes], reason: str
) -> None:
    async with says(tmp_path / f"old{INDEX_SUFFIX}", broken), view_of() as new:
        await beginner(tmp_path, new).start_warm()
    assert "old sent no complete prefix index" in caplog.text
    assert reason in caplog.text
    assert "what the workers can replay" in caplog.text


async def test_workers_that_came_whole_count_though_the_rest_does_not_come(
    tmp_path: Path, publisher: EventPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    async with informed(tmp_path, publisher) as old, view_of() as new:
        packed = msgspec.msgpack.encode(old.snapshot("w"))
        format_ = IndexFormat.of(SIZE, max(CODECS))
        parts = [pack(["format", MODEL, format_]), pack(["worker", MODEL, packed])]
        folder = tmp_path / "others"
        folder.mkdir()
        async with says(folder / f"dying{INDEX_SUFFIX}", parts):
            await beginner(folder, new).start_warm()
        assert "dying sent no complete prefix index" in caplog.text
        await new.add(worker(publisher))
        await knows(new, 7)


TODAY = max(CODECS)


def of_versions(oldest: int, newest: int) -> dict[int, SnapshotCodec]:
    """Codecs of which each understands only what was written by the same version."""

    def codec(version: int) -> SnapshotCodec:
        mark, plain = bytes([version]), CODECS[TODAY]

        def decode(packed: bytes) -> WorkerSnapshot:
            if not packed.startswith(mark):
                raise ValueError(f"not of version {version}")
            return plain.decode(packed[1:])

        return SnapshotCodec(lambda snapshot: mark + plain.encode(snapshot), decode)

    return {version: codec(version) for version in range(oldest, newest + 1)}


@pytest.mark.parametrize(
    ("mine", "theirs", "used"),
    [
        ((2, 3), (2, 3), 3),
        ((2, 3), (3, 4), 3),
        ((3, 4), (2, 3), 3),
        ((2, 2), (2, 3), 2),
        ((2, 3), (2, 2), 2),
        ((4, 5), (2, 3), None),
        ((2, 3), (4, 5), None),
    ],
)
@pytest.mark.parametrize("by_hub", [False, True])
async def test_neighbours_one_version_apart_exchange_the_highest_that_both_read(
    tmp_path: Path,
    publisher: EventPublisher,
    caplog: pytest.LogCaptureFixture,
    mine: tuple[int, int],
    theirs: tuple[int, int],
    used: int | None,
    by_hub: bool,
) -> None:
    async with informed(tmp_path / "unused", publisher, serves=False) as old, view_of() as new:
        running = IndexSharing(
            {MODEL: old}, tmp_path / f"old{INDEX_SUFFIX}", codecs=of_versions(*theirs)
        )
        starting = IndexSharing(
            {MODEL: new}, tmp_path / f"new{INDEX_SUFFIX}", codecs=of_versions(*mine)
        )
        await running.serve()
        if by_hub:  # which passes on nothing but the parts: they are of the oldest version

            async def parts() -> AsyncIterator[object]:
                for part in running.parts():
                    yield part

            await starting.take("door", parts())
            used = theirs[0] if mine[0] <= theirs[0] <= mine[1] else None
        else:
            await starting.start_warm()
        await running.close()
        await new.add(worker(publisher))
        if used is None:
            assert "is ignored: it is of version" in caplog.text
            assert new.index.snapshot("w") == []
        else:
            assert new.index.snapshot("w") == old.index.snapshot("w") != []


async def test_one_that_does_not_say_what_it_reads_gets_the_oldest(
    tmp_path: Path, publisher: EventPublisher
) -> None:
    """As front doors did before there was a choice."""
    async with informed(tmp_path / "unused", publisher, serves=False) as old:
        path = tmp_path / f"old{INDEX_SUFFIX}"
        sharing = IndexSharing({MODEL: old}, path, codecs=of_versions(2, 3))
        await sharing.serve()
        reader, writer = await asyncio.open_unix_connection(path)
        for _ in range(2):
            size = int.from_bytes(await reader.readexactly(4), "big")
            kind, name, found = msgspec.msgpack.decode(await reader.readexactly(size))
            assert (kind, name, found["version"]) == ("format", MODEL, 2)
        writer.close()
        await sharing.close()


async def test_a_single_front_door_asks_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with view_of() as new:
        await beginner(tmp_path, new, silence_s=SILENCE_S).start_warm()
    assert not caplog.records
