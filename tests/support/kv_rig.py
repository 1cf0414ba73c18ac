"""A small engine around the real KV connector: an arena, the bytes that each block must have."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from random import Random
from typing import Any, Self

from attrs import evolve
from tests.support.kv_integrity import check_connector

from commutator.config.kinds import config_converter
from commutator.contract.block import BlockDescriptor, CacheIdentity, KvEvent, RetentionHints
from commutator.contract.tier import Memory, TierConfig
from commutator.contract.worker import TierState
from commutator.plugins import PluginHost, load_plugins
from commutator.schema import structure
from commutator_engine_kit.kv import GroupChain, KvGroup
from commutator_engine_kit.kv.arena import Arena, BlockArena, BlockPart, ScatteredArena
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.tier_stack import OnboardTicket
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES
from commutator_engine_kit.kv.tiers.setup import TierSetup, make_tiers

__all__ = [
    "BLOCK_BYTES",
    "BLOCK_TOKENS",
    "KvRig",
    "chain",
    "content",
    "folder_setup",
    "host",
    "setups",
    "wait_for",
]

ROOT = Path(__file__).resolve().parent.parent.parent

BLOCK_BYTES = 4096
BLOCK_TOKENS = 4
IDENTITY = CacheIdentity(
    model="m",
    weights="w",
    tokenizer="t",
    dtype="float32",
    layout="bytes that follow from the key",
    block_size=BLOCK_TOKENS,
)


@cache
def host() -> PluginHost:
    return load_plugins()


def setups(*tiers: Mapping[str, Any], worker: str = "w0") -> tuple[TierSetup, ...]:
    """Tiers from entries as they stand under ``tiers`` in the configuration."""
    converter = config_converter(host())
    configs = [structure(converter, dict(tier), TierConfig) for tier in tiers]
    return make_tiers(configs, host(), worker)


def folder_setup(path: Path, blocks: int, **options: Any) -> TierSetup:
    """The tier of docs/plugins, for blocks of ``BLOCK_BYTES``; it is not installed."""
    source = ROOT / "docs/plugins/folder_tier/src/commutator_folder_tier/__init__.py"
    spec = spec_from_file_location("commutator_folder", source)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    capacity = blocks * (BLOCK_BYTES + HEADER_BYTES)
    config = module.FolderConfig(kind="folder", path=str(path), capacity=capacity)
    (model,) = setups({"kind": "dram", "capacity": "1MB"})
    return evolve(model, name="folder", tier=module.FolderTier(config), **options)


def chain(name: int, length: int) -> list[bytes]:
    """The keys of a prompt's blocks."""
    return [hashlib.sha256(b"%d/%d" % (name, index)).digest() for index in range(length)]


def content(key: bytes, size_bytes: int = BLOCK_BYTES) -> bytes:
    """The bytes of a block; half of them compress."""
    half = Random(key).randbytes(size_bytes // 2)
    return half + bytes(size_bytes - len(half))


def wait_for(what: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Raise AssertionError when it does not become true."""
    deadline_s = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.002)


def _arena(address: int, block_bytes: int, blocks: int, pieces: int) -> Arena:
    if pieces == 1:
        return BlockArena(
            memory=Memory.DRAM, address=address, block_bytes=block_bytes, count=blocks
        )
    size = block_bytes // pieces
    parts = [
        BlockPart(address=address + piece * size, size_bytes=size, stride_bytes=block_bytes)
        for piece in reversed(range(pieces))
    ]
    return ScatteredArena(memory=Memory.DRAM, parts=tuple(parts), count=blocks)


class KvRig:
    """Every device block is either here or the connector's; what is onboarded is compared."""

    def __init__(
        self,
        tiers: Sequence[TierSetup],
        *,
        blocks: int = 64,
        block_bytes: int = BLOCK_BYTES,
        pieces: int = 1,
        wake: Callable[[], None] = lambda: None,
        groups: Sequence[KvGroup] = (),
        start: bool = True,
    ) -> None:
        """With several ``pieces`` of a block, tiers have them in another order than the engine."""
        self.block_bytes = block_bytes
        self._memory = mmap.mmap(-1, block_bytes * blocks)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.connector = KvConnector(
            tiers,
            _arena(address, block_bytes, blocks, pieces),
            IDENTITY,
            worker_id="rig",
            reports_evictions=True,
            wake=wake,
            groups=groups,
        )
        self.free = list(range(blocks))
        self.lent: Counter[int] = Counter()
        self.loads: dict[str, tuple[OnboardTicket, list[bytes], list[int]]] = {}
        self.finished: dict[str, int] = {}
        self.events: list[KvEvent] = []
        if start:
            self.connector.start()

    def offload(
        self,
        keys: Sequence[bytes],
        *,
        evicting: bool = False,
        tenant: str | None = None,
        adapter: str | None = None,
    ) -> None:
        """Compute a chain and offload it."""
        offers = [
            BlockDescriptor(
                key=key,
                parent=keys[index - 1] if index else None,
                token_ids=tuple(key[:BLOCK_TOKENS]),
                facts=RetentionHints(tenant=tenant),
                adapter=adapter,
            )
            for index, key in enumerate(keys)
        ]
        self.offload_as(offers, evicting=evicting)

    def offload_as(self, offers: Sequence[BlockDescriptor], *, evicting: bool = False) -> None:
        """Compute and offload blocks."""
        blocks = [self._take() for _ in offers]
        for offer, block in zip(offers, blocks, strict=True):
            self._memory[block * self.block_bytes : (block + 1) * self.block_bytes] = content(
                offer.key, self.block_bytes
            )
        self.lent.update(blocks)
        connector = self.connector
        (connector.stores.offload_evicted if evicting else connector.stores.offload)(offers, blocks)

    def plan(self, keys: Sequence[bytes]) -> OnboardTicket:
        """Which of a chain's first blocks can be loaded."""
        planned = self.connector.lookups.plan(keys)
        self.wait_for(planned.done)
        return planned.result()

    def begin(self, keys: Sequence[bytes]) -> str | None:
        """Begin to load what is there of a chain; None: nothing is."""
        ticket = self.plan(keys)
        count = ticket.blocks
        if not count or count > len(self.free):
            self.connector.loads.cancel(ticket)
            return None
        blocks = [self._take() for _ in range(count)]
        for block in blocks:
            start = block * self.block_bytes
            self._memory[start : start + self.block_bytes] = b"\xee" * self.block_bytes
        self.lent.update(blocks)
        self.loads[ticket.id] = ticket, list(keys[:count]), blocks
        self.connector.loads.onboard(ticket, blocks)
        return ticket.id

    def load_groups(
        self, chains: Sequence[GroupChain], limit_tokens: int
    ) -> tuple[OnboardTicket, bool]:
        """Load what all need at the last boundary that all can serve; whether it is good."""
        planned = self.connector.lookups.plan_groups(chains, limit_tokens)
        self.wait_for(planned.done)
        ticket = planned.result()
        if not ticket.places:
            return ticket, True
        blocks: list[list[int]] = [[] for _ in chains]
        for group, _ in ticket.places:
            blocks[group].append(self._take())
        flat = [block for those in blocks for block in those]
        self.lent.update(flat)
        keys = [chains[group].keys[number] for group, number in ticket.places]
        self.loads[ticket.id] = ticket, keys, flat
        loaded = self.connector.loads.onboard_groups(ticket, blocks)
        self.wait_for(lambda: ticket.id in self.finished and loaded.done())
        assert set(loaded.result()) == {self.finished[ticket.id] > 0}
        return ticket, self.finished[ticket.id] == len(keys)

    def cancel(self, load_id: str) -> None:
        self.connector.loads.cancel(self.loads[load_id][0])

    def load(self, keys: Sequence[bytes], timeout_s: float = 20.0) -> int:
        """How many of the first blocks of a chain came back, and are what they were."""
        load_id = self.begin(keys)
        if load_id is None:
            return 0
        self.wait_for(lambda: load_id in self.finished, timeout_s)
        return self.finished[load_id]

    def poll(self) -> None:
        """Take what the connector has, and compare what it loaded."""
        polled = self.connector.poll()
        self.events += polled.events
        for onboard in polled.onboards:
            ticket, keys, blocks = self.loads.pop(onboard.ticket.id)
            self.finished[ticket.id] = onboard.blocks
            for key, block in zip(keys[: onboard.blocks], blocks, strict=False):
                assert self.bytes_of(block) == content(key, self.block_bytes), "another block"
        for block in polled.released:
            self.lent[block] -= 1
            assert self.lent[block] >= 0, f"block {block} was given back twice"
            if not self.lent[block]:
                self.free.append(block)

    def wait_for(self, what: Callable[[], object], timeout_s: float = 20.0) -> None:
        """Poll until it is true. Raises AssertionError when it does not become so."""

        def true() -> object:
            self.poll()
            return what()

        wait_for(true, timeout_s)

    def bytes_of(self, block: int) -> bytes:
        return self._memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def settle(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing goes on: then every block must be back."""

        def settled() -> bool:
            self.poll()
            return self.connector.idle and not self.loads

        wait_for(settled, timeout_s)
        self.wait_for(lambda: not +self.lent, timeout_s)
        check_connector(self.connector)

    def store(self, keys: Sequence[bytes]) -> None:
        """Offload a chain, and wait."""
        self.offload(keys)
        self.settle()

    def tier(self, name: str) -> TierState:
        """A tier's state and counters."""
        return next(tier for tier in self.connector.statistics().tiers if tier.name == name)

    def stored(self, source: str, target: str) -> int:
        return self.connector.statistics().edge(source, target).stored

    def failed(self, source: str, target: str) -> Mapping[str, int]:
        return self.connector.statistics().edge(source, target).failed

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self) -> int:
        self.wait_for(lambda: self.free)
        return self.free.pop()
