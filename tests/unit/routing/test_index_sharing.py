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
from commutator.kv_events.publisher import EventPublisher
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.prefix_index.snapshot import INDEX_SUFFIX, IndexFormat, IndexSharing

MODEL = "m/0"
SILENCE_S = 0.2
PATIENCE_S = 60.0


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
async def informed(folder: Path, publisher: EventPublisher) -> AsyncIterator[KvIndexer]:
    """A front door that runs, and has heard of a prompt of seven blocks, one after the other."""
    async with view_of() as view:
        await view.add(worker(publisher))
        for blocks in range(1, 8):
            publisher.publish([stored(blocks - 1, blocks)])
            await knows(view, blocks)
        sharing = IndexSharing({MODEL: view}, folder / f"old{INDEX_SUFFIX}")
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
        ([pack(["format", MODEL, {"block_size": SIZE}])], "missing required field `hash_check`"),
        ([pack(["worker", MODEL, b"\x81\xa1x\x01"])], "missing required field `worker_id`"),
        ([pack(["worker", MODEL, b"\xc1"])], "malformed"),
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
        parts = [pack(["format", MODEL, IndexFormat.of(SIZE)]), pack(["worker", MODEL, packed])]
        folder = tmp_path / "others"
        folder.mkdir()
        async with says(folder / f"dying{INDEX_SUFFIX}", parts):
            await beginner(folder, new).start_warm()
        assert "dying sent no complete prefix index" in caplog.text
        await new.add(worker(publisher))
        await knows(new, 7)


async def test_a_single_front_door_asks_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with view_of() as new:
        await beginner(tmp_path, new, silence_s=SILENCE_S).start_warm()
    assert not caplog.records
