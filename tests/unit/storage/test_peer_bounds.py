"""What peers may cost each other: look-ups, memory and time are bounded, whatever a peer says."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from commutator.contract.tier import RemoteAgent, SlotGeometry, Span
from commutator.contract.worker import KvTransferInfo
from commutator.errors import EngineHandoverError
from commutator_engine_kit.kv.transfer.event_loop import EventLoopThread
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import (
    ExportedMemory,
    LentBlocks,
    LookupRequest,
    ReadyBlock,
    ReleaseRequest,
)
from commutator_engine_kit.kv.transfer.sources import Connection, Sources
from commutator_peer.config import PeerTierConfig
from commutator_peer.tier import PeerTier

pytestmark = pytest.mark.security

GEOMETRY = SlotGeometry(block_bytes=64, slot_bytes=64, identity="ab" * 32)
NOTHING = LentBlocks(RemoteAgent(name="peer", metadata=b""), 30.0)


def chain(name: int, length: int = 3) -> list[bytes]:
    return [bytes([name, index]) * 16 for index in range(length)]


@pytest.fixture
def loop() -> Iterator[EventLoopThread]:
    thread = EventLoopThread("exporters")
    yield thread
    thread.close()


def listen(loop: EventLoopThread, answer: Callable[[LookupRequest], LentBlocks]) -> str:
    """An exporter that answers look-ups; its address."""

    async def look_up(request: LookupRequest) -> LentBlocks:
        return answer(request)

    async def start() -> str:
        return BlockExporter(lambda: None, look_up=look_up, most_blocks=100).start()

    return loop.run(start())


def tier_of(addresses: list[str]) -> PeerTier:
    tier = PeerTier(PeerTierConfig(kind="peer", ask_timeout_s=10.0))
    tier.use_peers(lambda: addresses)
    tier.open(GEOMETRY)
    return tier


def lend(key: bytes, *, span: Span | None = None, **changes: Any) -> LentBlocks:
    block = ReadyBlock(0, key, 0, Span(4096, 64) if span is None else span)
    answer: dict[str, Any] = {"agent": RemoteAgent(name="a", metadata=b""), "lease_s": 30.0}
    return LentBlocks(**(answer | changes), blocks=(block,))


def test_a_look_up_asks_a_few_peers_however_many_there_are(loop: EventLoopThread) -> None:
    """Otherwise each of n workers asked n for each prompt."""
    asked: Counter[int] = Counter()

    def peer(number: int) -> str:
        def answer(request: LookupRequest) -> LentBlocks:
            asked[number] += 1
            has = number == 17 and request.keys[0] == chain(200)[0]
            return lend(request.keys[0]) if has else NOTHING

        return listen(loop, answer)

    tier = tier_of([peer(number) for number in range(30)])
    for prompt in range(15):
        assert tier.probe(chain(prompt)) == [None] * 3
    assert asked.total() == 15 * 8
    assert set(asked) == set(range(30)), "each is asked in its turn"
    needed = next(n for n in range(1, 10) if tier.probe(chain(200))[0] is not None)
    assert needed <= 4, "whoever has a prompt is found soon"
    tier.make_room(chain(200)[:1])
    assert tier.probe(chain(200))[0] is not None, "and asked again at once"
    tier.close()


@pytest.mark.parametrize(
    "hostile",
    [
        {"lease_s": math.inf},
        {"lease_s": math.nan},
        {"lease_s": -1.0},
        {"span": Span(-4096, 64)},
        {"span": Span((1 << 64) - 32, 64)},
        {"span": Span(4096, 1 << 62)},
        {"span": Span(4096, 0)},
        {"span": Span(4096, 64, -1)},
        {"agent": RemoteAgent(name="a", metadata=bytes((1 << 22) + 1))},
    ],
    ids=lambda hostile: f"{next(iter(hostile))}={str(next(iter(hostile.values())))[:40]}",
)
def test_a_block_that_cannot_be_where_a_peer_says_is_not_borrowed(
    loop: EventLoopThread, hostile: dict[str, Any]
) -> None:
    liar = listen(loop, lambda request: lend(request.keys[0], **hostile))
    tier = tier_of([liar])
    assert tier.probe(chain(1)) == [None] * 3
    assert tier.statistics().committed == 0
    tier.use_peers(lambda: [liar, listen(loop, lambda request: lend(request.keys[0]))])
    assert tier.probe(chain(1))[0] is not None, "an honest peer is believed"
    tier.close()


def test_a_lease_of_years_is_not_believed(loop: EventLoopThread) -> None:
    tier = tier_of([listen(loop, lambda request: lend(request.keys[0], lease_s=86_000.0))])
    assert tier.probe(chain(1))[0] is not None
    (entry,) = tier._borrowed.values()
    tier._expire(entry.ends_s)
    assert tier.statistics().committed == 0
    started_s = asyncio.run(_now())
    assert entry.ends_s - started_s <= 300.0
    tier.close()


async def _now() -> float:
    return asyncio.get_running_loop().time()


INFO = KvTransferInfo(protocol="pull-1", identity="weights", block_size=4, token_bytes=8)
MEMORY = ExportedMemory(INFO, "agent", b"", "DRAM", 4096, 32, 100)


@pytest.mark.parametrize(
    "hostile",
    [
        {"blocks": 1 << 40},
        {"blocks": -1},
        {"block_bytes": 0},
        {"block_bytes": -32},
        {"address": -1},
        {"device": -1},
        {"runs": 0},
        {"runs": 1 << 40},
        {"metadata": bytes((1 << 22) + 1)},
        {"agent": "a" * 1000},
    ],
    ids=lambda hostile: f"{next(iter(hostile))}={str(next(iter(hostile.values())))[:40]}",
)
async def test_memory_that_cannot_be_is_refused(hostile: dict[str, Any]) -> None:
    """A count of blocks becomes a list of as many descriptors."""

    class Liar(Connection):
        async def start(self) -> None:
            return

        async def ask(self, what: str, arguments: Any, *, timeout_s: float) -> Any:
            del what, arguments, timeout_s
            return msgspec.to_builtins(MEMORY) | hostile

    with pytest.raises(EngineHandoverError, match="no valid ExportedMemory"):
        await Sources(Liar).memory("10.0.0.1:1")


LOOK_UP = {"id": "a", "identity": "b", "slot_bytes": 1, "keys": [b"k" * 32]}
WATCH = {"id": "a", "have": 0, "state": "unknown", "wait_s": 0.0}


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("release", {"id": "x" * 129}),
        ("release", {"id": "x", "blocks": [0] * ((1 << 20) + 1)}),
        ("look_up", LOOK_UP | {"id": "x" * 129}),
        ("look_up", LOOK_UP | {"identity": "x" * 257}),
        ("look_up", LOOK_UP | {"keys": [b"k" * 65]}),
        ("look_up", LOOK_UP | {"keys": [b"k"] * ((1 << 20) + 1)}),
        ("watch", WATCH | {"id": "x" * 129}),
        ("watch", WATCH | {"wait_s": math.nan}),
        ("watch", WATCH | {"wait_s": -1.0}),
        ("watch", WATCH | {"have": -1}),
    ],
)
async def test_a_question_beyond_all_bounds_is_refused(
    what: str, arguments: dict[str, Any]
) -> None:
    """The exporter would remember it, or wait for it."""

    async def look_up(_: LookupRequest) -> LentBlocks:
        raise AssertionError("it must not be looked up")

    exporter = BlockExporter(lambda: None, look_up=look_up)
    with pytest.raises(EngineHandoverError, match="are wrong"):
        await exporter.answer(what, arguments)


async def test_a_reader_with_endless_open_questions_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("commutator_engine_kit.kv.transfer.exporter._MOST_QUESTIONS", 50)
    exporter = BlockExporter(lambda: None)
    address = exporter.start()
    connection = Connection(address)
    await connection.start()
    for number in range(51):
        connection.tell("watch", WATCH | {"id": str(number), "wait_s": 60.0})
    async with asyncio.timeout(20):
        while connection.connected:
            await asyncio.sleep(0.01)
    other = Connection(address)
    await other.start()
    released = await other.ask("release", ReleaseRequest("1"), timeout_s=20.0)
    assert released is None
    await other.close()
    exporter.stop()
