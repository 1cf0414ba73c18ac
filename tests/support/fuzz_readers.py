"""A process that reads what others send: KV events, other workers' blocks, the registry's frames.

The arguments are the addresses of a fuzzer that plays all of them: of an event publisher, of its
replays, of an exporter, and of a registry. Prints a line once it reads. Lines on stdin are answered
as by ``fuzz_target``, and say how much was believed.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from tests.support.fuzz_target import Watched, answer_reports

from commutator.backoff import Backoff
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.routing import RouterConfig
from commutator.contract.tier import SlotGeometry
from commutator.contract.worker import EngineInfo, EventSource, KvTransferInfo, WorkerRecord
from commutator.errors import RegistryError
from commutator.kv_events.subscriber import SourceTimes
from commutator.launcher.child import calm_garbage_collector
from commutator.registry import client as client_module
from commutator.registry import hub as hub_module
from commutator.registry.client import RegistryClient
from commutator.registry.hub import Hub
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.replica_sync import ReplicaSync
from commutator_engine_kit.kv.transfer.protocol import DecodeTransferParams, ExportedMemory
from commutator_engine_kit.kv.transfer.puller import Puller, PullTimes
from commutator_engine_kit.kv.transfer.reader import PromptBlock, ReadTarget
from commutator_peer.config import PeerTierConfig
from commutator_peer.tier import PeerTier

BLOCK = 16
PROMPT = tuple(range(2 * BLOCK))
IDENTITY = "ab" * 32
OWN = KvTransferInfo(protocol="pull-1", identity=IDENTITY, block_size=BLOCK, token_bytes=4)
_OFTEN_S = 0.02
_PAUSE_S = 0.002
"""Between two questions, which must not keep the processor busy."""
_PATIENT_S = 2.0
"""The fuzzer ends a connection on which it leaves a question open."""
_TIMES = PullTimes(poll_s=_OFTEN_S, silence_s=_PATIENT_S, hello_s=_PATIENT_S)


class Believed:
    """How much of what came was valid."""

    def __init__(self) -> None:
        self.blocks = 0
        """Lent by a peer."""
        self.pulls = 0
        """Hand-overs whose blocks all came."""
        self.changes = 0
        """Of workers."""
        self.kept_alive = 0
        """Answers to a lease."""


class _NothingMoves:
    """A ``BlockMover`` that says that every block was read."""

    nixl_bytes = 0

    async def fetch(
        self,
        source: ExportedMemory,
        blocks: Sequence[PromptBlock],
        target: ReadTarget,
        timeout_s: float,
    ) -> list[str | None]:
        del source, target, timeout_s
        return [None] * len(blocks)

    def forget(self, source: ExportedMemory) -> None:
        pass


async def read_all(watched: Watched, addresses: Sequence[str]) -> None:
    events, replay, exporter, registry = addresses
    indexer = KvIndexer(
        RouterConfig(kind="kv", block_size=BLOCK),
        times=SourceTimes(replay_timeout_s=0.1, settle_s=_OFTEN_S, check_interval_s=_OFTEN_S),
    )
    await indexer.add(worker(EventSource(endpoint=events, replay_endpoint=replay)))
    believed, load = Believed(), InFlightLoad()
    sync = ReplicaSync("a", load, Hub(registry))
    background = [
        asyncio.create_task(work)
        for work in (
            _use_index(indexer),
            asyncio.to_thread(_borrow, exporter, believed),
            _pull(exporter, believed),
            _watch(registry, believed),
            _ask(registry, believed),
            sync.run(),
        )
    ]
    for task in background:
        task.add_done_callback(_ended)
    calm_garbage_collector()  # as front doors and workers do
    print(json.dumps({}), flush=True)
    await answer_reports(
        watched,
        lambda: {
            "indexed": indexer.index.statistics().blocks,
            "borrowed": believed.blocks,
            "pulled": believed.pulls,
            "changes": believed.changes,
            "kept_alive": believed.kept_alive,
            "doors": load.peers,
        },
    )


def _ended(task: asyncio.Task[None]) -> None:
    """None of them may end: the fuzzer finds the traceback."""
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def worker(source: EventSource) -> WorkerRecord:
    info = EngineInfo(
        kind="fake", version="1", model="m", max_model_len=4096, block_size=BLOCK,
        kv_capacity_blocks=4096, data_parallel_size=1, kv_events=source,
    )  # fmt: skip
    return WorkerRecord(
        worker_id="w", engine="e", kind="fake", model="m", address="127.0.0.1:1", info=info
    )


async def _use_index(indexer: KvIndexer) -> None:
    """What a front door does with what the events brought."""
    request = GenerateRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams())
    hashes = indexer.hashes(request)
    while True:
        indexer.match(hashes)
        indexer.computed("w", hashes)
        indexer.warnings()
        indexer.statistics()
        indexer.snapshot("w")
        await asyncio.sleep(_OFTEN_S)


def _borrow(exporter: str, believed: Believed) -> None:
    """The `peer` tier asks for ever, reads nothing, and forgets what it found."""
    tier = PeerTier(
        PeerTierConfig(
            kind="peer",
            peers=(f"tcp://{exporter}",),
            ask_timeout_s=_PATIENT_S,
            max_silences=1_000_000_000,
        )
    )
    tier.open(SlotGeometry(block_bytes=64, slot_bytes=64, identity=IDENTITY))
    number = 0
    while True:
        time.sleep(_PAUSE_S)
        number += 1
        chain = [number.to_bytes(31, "big") + bytes([index]) for index in range(3)]
        found = [block for block in tier.probe(chain) if block is not None]
        believed.blocks += len(found)
        for block in found:
            tier.place(block.slot, block.size_bytes)
            tier.peer(block.slot)
        for block in found[:1]:
            tier.pin(block.slot)
            tier.unpin(block.slot)
        tier.statistics()
        tier.make_room(chain)


async def _pull(exporter: str, believed: Believed) -> None:
    news = asyncio.Event()
    puller = Puller(_NothingMoves(), OWN, news.set, _TIMES)
    puller.start()
    request = GenerateRequest(request_id="r", token_ids=PROMPT, sampling=SamplingParams())
    key = 0
    while True:
        key += 1
        puller.begin(key, DecodeTransferParams(f"pull-{key}", exporter, BLOCK, _PATIENT_S), request)
        puller.set_destination(key, ReadTarget(0, len(PROMPT), range(2)))
        over = released = False
        while not (over and released):
            await news.wait()
            news.clear()
            results, gone = puller.poll()
            over |= bool(results)
            released |= bool(gone)
            believed.pulls += sum(one.good_tokens == len(PROMPT) for one in results)


async def _watch(registry: str, believed: Believed) -> None:
    async for changes in RegistryClient(registry).watch():
        believed.changes += len(changes)


async def _ask(registry: str, believed: Believed) -> None:
    client = RegistryClient(registry)
    while True:
        with suppress(RegistryError):
            believed.kept_alive += await client.keep_alive(1)
        await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    # Each wrong frame ends a connection: with pauses as usual, 10,000 would take an hour.
    client_module.RECONNECT = Backoff(first_s=0.001, longest_s=0.01)
    vars(hub_module)["RECONNECT"] = client_module.RECONNECT
    watched = Watched()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watched)) as runner:
        runner.run(read_all(watched, sys.argv[1:]))
