"""Storage tiers: an address space of slots that NIXL can read and write.

A tier says where the bytes of a block go, and remembers, durably if it can, which blocks are
valid. It moves no bytes: the block manager chooses the blocks to store and to evict, and core moves
the bytes with NIXL. The life of a slot:

    free --reserve--> reserved --(bytes are written and verified)--> commit --> committed
    reserved --release--> free              committed --evict--> free, once no reader pins it

A slot from ``reserve`` is valid until ``release``, or after ``commit`` until the block is evicted;
a span from ``place`` is valid as long as its slot. Pins outlive eviction: the bytes of a pinned
slot stay where they are until the last ``unpin``, also after its block was evicted or forgotten.

Methods are called from one thread. They work in memory unless they say otherwise. ``reserve`` and
``lookup`` answer for each block; the answer None means that it cannot be done.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from attrs import Attribute, frozen

from commutator.contract.block import BlockKey
from commutator.contract.eviction import EvictionConfig
from commutator.contract.settings import (
    Fraction,
    PositiveInt,
    PositiveSeconds,
    Secret,
    Size,
    setting,
)
from commutator.errors import TierError

__all__ = [
    "UNBOUNDED",
    "BlockSeal",
    "Direction",
    "ExportOptions",
    "Memory",
    "Region",
    "RemoteAgent",
    "Slot",
    "SlotGeometry",
    "Span",
    "StorageTier",
    "StoredBlock",
    "TierConfig",
    "TierPolicyConfig",
    "TierStatistics",
]

UNBOUNDED = sys.maxsize
"""Capacity of a tier without a limit."""


Slot = int
"""The number of a slot within its tier, from 0."""


class BlockSeal(ABC):
    """One of a tier's keys, for what the tier keeps about its blocks beside their bytes.

    Core makes it from `encryption_key` or `integrity_key`, and applies the same key to the bytes.
    What is sealed is authentic; with `encryption_key` it is secret, too.
    """

    identity: str
    """``SlotGeometry.identity`` of the blocks under this key."""
    overhead_bytes: int
    """By how much ``seal`` lengthens data: always the same."""

    @abstractmethod
    def seal(self, data: bytes, place: bytes) -> bytes:
        """Seal ``data`` for one place, such as a slot of one file: elsewhere it is not valid."""

    @abstractmethod
    def unseal(self, sealed: bytes, place: bytes) -> bytes | None:
        """What was sealed for the place; None if that was not done with this key, for it."""

    @abstractmethod
    def name(self, key: BlockKey) -> str:
        """The block's name where others may see it: always the same, of lower-case hex digits.

        With `encryption_key`, who lacks the key learns nothing from it; else it is the block's key.
        """

    @abstractmethod
    def key_of(self, name: str) -> BlockKey | None:
        """The block with this name; None if ``name`` with this key did not return it."""


@frozen(kw_only=True)
class SlotGeometry:
    """The sizes of a tier's slots, and the identity of the blocks in them."""

    block_bytes: int
    """Size of one KV block in the engine's memory."""
    slot_bytes: int
    """Largest number of bytes written into one slot: the encoded block, and a header where the tier
    is ``framed``."""
    block_tokens: int = 0
    """Tokens in a full block: the largest length of ``StoredBlock.token_ids``."""
    identity: str
    """Hex digest of the deployment's cache identity without adapter and salt, and of the codecs
    that encode the tier's blocks. Ignore blocks of another identity on a shared or persistent
    medium, but for those of ``seals``."""
    seals: tuple[BlockSeal, ...] = ()
    """For a tier with a key: the current one, and then those that are only read. Empty without."""

    def slots_in(self, capacity_bytes: int) -> int:
        """How many slots fit into ``capacity_bytes``. Raises TierError when not one does."""
        if capacity_bytes < self.slot_bytes:
            raise TierError(
                f"a capacity of {capacity_bytes} bytes holds no block; "
                f"set it to at least {self.slot_bytes}"
            )
        return capacity_bytes // self.slot_bytes


@frozen(kw_only=True)
class StoredBlock:
    """A committed block, as its tier remembers it."""

    key: BlockKey
    """The block's key."""
    slot: Slot
    """The slot that holds its bytes."""
    size_bytes: int
    """Bytes written into the slot."""
    checksum: int = 0
    """xxh3_64 over those bytes; 0 where the tier is ``framed``."""
    parent: BlockKey | None = None
    """The key before it in its chain; None for a first block or where it is not known."""
    token_ids: tuple[int, ...] = ()
    """The block's tokens, for KV events; empty where the tier does not store them."""
    adapter: str | None = None
    """The adapter that computed it; None also where the tier does not store it."""
    tenant: str | None = None
    """The cache salt of its request; None also where the tier does not store it."""


@frozen(kw_only=True)
class TierStatistics:
    """How full a tier is, in slots."""

    capacity: int
    """All slots; ``UNBOUNDED`` where the tier sets no limit."""
    committed: int
    """Slots that hold a valid block."""
    reserved: int
    """Slots that were reserved and neither committed nor released."""
    pinned: int
    """Slots with at least one pin."""
    damaged: int = 0
    """Blocks of an earlier run that were lost or not intact when the tier was opened."""


@frozen(kw_only=True)
class RemoteAgent:
    """Another process's NIXL agent, whose memory holds a slot's bytes."""

    name: str
    """The agent's name, unique among the processes that exchange blocks."""
    metadata: bytes
    """NIXL's metadata of the agent, for ``TransferAgent.add_peer``; from a trusted process only."""


@frozen(kw_only=True)
class ExportOptions:
    """How a worker lends its blocks in host memory to other workers."""

    host: str = "127.0.0.1"
    """Address to listen on. Readers can read every block whose key they know."""
    port: int = 0
    """0: any free one."""
    advertise: str | None = None
    """The host in the address that others get; None: ``host``."""
    lease_s: float = 30.0
    """Longest time in seconds for which a reader keeps a block in its slot."""
    max_leased_blocks: int = 4096
    """Limit for all readers together, as a lent block is not evicted."""


class Memory(StrEnum):
    """NIXL's kinds of memory; the values are NIXL's names."""

    DRAM = "DRAM"
    """Main memory."""
    VRAM = "VRAM"
    """GPU memory."""
    FILE = "FILE"
    """Files."""
    OBJ = "OBJ"
    """Objects of an object store."""


class Span(NamedTuple):
    """One contiguous piece of a region. As a tuple it is a NIXL descriptor.

    A tuple because a transfer makes thousands of them, and an attrs class takes thrice the time.
    """

    address: int
    """A byte address (DRAM, VRAM), or a byte offset (FILE, OBJ)."""
    size_bytes: int
    """Its length."""
    device: int = 0
    """The GPU (VRAM), the file descriptor (FILE) or the number of the object (OBJ)."""


@frozen(kw_only=True)
class Region:
    """A piece of memory, a file or an object that must be registered with NIXL."""

    memory: Memory
    """The kind of memory."""
    span: Span
    """What is registered."""
    name: str = ""
    """The object's key (OBJ), or the path in NIXL's path mode (FILE); else empty."""


class StorageTier(ABC):
    """One storage tier. ``SlotTier`` of the engine kit implements all but the bytes' places."""

    medium: str
    """Its name in KV events: one that ``contract.block.cache_level`` knows, such as "CPU", "DISK",
    "NVME", "REMOTE" or "EXTERNAL". Routers count an unknown medium as external."""
    memory: Memory
    """The kind of memory that every span of this tier is in."""
    backend: str
    """The NIXL backend that moves its bytes: the name of an installed NIXL plugin that supports
    ``memory``, such as "UCX" (DRAM, VRAM), "POSIX", "GDS" or "GDS_MT" (FILE), or "OBJ" (OBJ)."""
    framed: bool = False
    """Whether core writes a header with key and checksum before each block, because the tier does
    not store them."""
    shared: bool = False
    """Whether other workers write to the same medium, so that it may hold blocks unknown here."""
    writable: bool = True
    """Whether blocks can be stored there; False: only read."""
    asks_peers: bool = False
    """Whether it reads blocks of other workers; core then calls ``use_peers``."""
    alignment_bytes: int = 1
    """For direct I/O: sizes given to ``place``, and addresses and sizes on the other side of a
    transfer, must be multiples of this, or NIXL fails to move them. ``open`` may set it."""

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        """Called before ``open``, for tiers that read from other workers.

        ``find`` returns the addresses, "host:port", at which the other live workers lend blocks.
        Any thread may call it, and it never waits.
        """

    @property
    def export_options(self) -> ExportOptions | None:
        """How this worker lends its blocks in host memory to others; None: it lends none."""
        return None

    @property
    def backend_parameters(self) -> Mapping[str, str]:
        """The parameters of the NIXL backend. May hold secrets: never print them."""
        return {}

    @abstractmethod
    def open(self, geometry: SlotGeometry) -> Sequence[StoredBlock]:
        """Allocate memory, open files or connect; return every block that an earlier run committed.

        Called once, before all other methods but ``use_peers``. May use the disk or the network.
        Raises TierError, saying what to do, when the tier cannot be used.
        """

    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """What core registers with NIXL from ``open`` to ``close``; empty if ``place`` names it."""

    @abstractmethod
    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """Reserve a free slot for each key; None where no slot is free or the key has one already.

        A slot stays reserved until ``commit`` or ``release``. In memory only.
        """

    @abstractmethod
    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        """The first ``size_bytes`` of a reserved or committed slot; valid while the slot is.

        The region must be registered for this span; None when it is one of ``regions``.
        """

    @abstractmethod
    def commit(self, blocks: Iterable[StoredBlock]) -> None:
        """Make reserved slots valid: their bytes were written. Durable where the tier is.

        May write metadata. Raises TierError when that fails; the slots are then still reserved.
        Raises ValueError when a slot is not reserved for its block's key.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """The committed block of each key, as this process knows it. In memory only."""

    def probe(self, keys: Sequence[BlockKey]) -> list[StoredBlock | None]:
        """Like ``lookup``, but queries the medium where it is ``shared``. May wait for the network.

        ``keys`` are one chain from its beginning. Keys behind a missing block need no query, as
        their blocks cannot be used. ``lookup`` knows the found blocks afterwards. Raises TierError
        when the medium cannot be queried.
        """
        return self.lookup(keys)

    def peer(self, slot: Slot) -> RemoteAgent | None:
        """The agent whose memory holds the slot; None: this process, or a medium without an agent.

        The slot of a remote agent can only be read, by a transfer that names the agent.
        """
        return None

    @abstractmethod
    def pin(self, slot: Slot) -> None:
        """Keep the slot from being reused until as many calls of ``unpin``, also after eviction.

        For readers, and for a reserved slot that NIXL may still write to. Raises ValueError when
        the slot is free.
        """

    @abstractmethod
    def unpin(self, slot: Slot) -> None:
        """Undo one ``pin``. Raises ValueError when the slot is not pinned."""

    @abstractmethod
    def release(self, slots: Iterable[Slot]) -> None:
        """Free reserved slots whose bytes will not be committed, each once it has no pins.

        Raises ValueError when one is not reserved.
        """

    @abstractmethod
    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Remove committed blocks, durably; each slot is free once it has no pins.

        For damaged or unwanted blocks: on a ``shared`` medium also the copies of other workers are
        removed. Ignores unknown keys. May write metadata. Raises TierError when that fails; the
        blocks are then still committed.
        """

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        """Like ``evict``, for intact blocks, to free their slots.

        On a ``shared`` medium the copies of other workers stay, and ``probe`` can find them.
        """
        self.evict(keys)

    @abstractmethod
    def committed(self) -> Iterable[StoredBlock]:
        """Every committed block, in any order."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """How full the tier is."""

    @abstractmethod
    def close(self) -> None:
        """Release memory, files and connections. Blocks of a durable tier stay committed."""


class Direction(StrEnum):
    """The direction of a transfer; the values are NIXL's names."""

    READ = "READ"
    """From the remote side to the local one."""
    WRITE = "WRITE"
    """From the local side to the remote one."""


@frozen(kw_only=True)
class AdmissionConfig:
    """Which blocks a tier stores. A block is never stored twice in one tier."""

    min_hits: PositiveInt = setting(
        "Store a block once it was used this many times; its first computation is a use.", 1
    )
    max_blocks: PositiveInt | None = setting(
        "Store only this many blocks from the beginning of a prompt.", None
    )
    prompt_only: bool = setting("Do not store blocks with generated tokens.", False)


def _default_eviction() -> EvictionConfig:
    return EvictionConfig(kind="lru")


@frozen(kw_only=True)
class TierPolicyConfig:
    """Which blocks a tier stores and evicts; for storage tiers and for the tiers of simulations."""

    kind: str = setting("The storage tier plugin.")
    write: Literal["through", "on_evict"] = setting(
        "When a block is stored: as soon as it is computed (through), or when the tier above "
        "evicts it (on_evict).",
        "through",
    )
    eviction: EvictionConfig = setting(
        "Which block is evicted when room is needed; {kind: lru} by default.",
        factory=_default_eviction,
    )
    admission: AdmissionConfig = setting("Which blocks are stored.", factory=AdmissionConfig)
    tenant_share: Fraction | None = setting(
        "Largest part of the capacity for the blocks of one tenant (`cache_salt`); above it the "
        "tenant's own blocks are evicted. No limit when not given, nor for blocks without a salt.",
        None,
    )
    tenant_shares: Mapping[str, Fraction] = setting(
        "Other shares for single tenants, by `cache_salt`.", factory=dict
    )


def _alone(config: TierConfig, attribute: Attribute[Any], value: Secret | None) -> None:
    if value is not None and config.encryption_key is not None:
        raise ValueError(f"{attribute.name}: remove it; encryption_key authenticates blocks, too")


def _beside_a_key(config: TierConfig, attribute: Attribute[Any], value: Sequence[Secret]) -> None:
    if value and config.encryption_key is None and config.integrity_key is None:
        raise ValueError(f"{attribute.name}: has no effect without encryption_key or integrity_key")


@frozen(kw_only=True)
class TierConfig(TierPolicyConfig):
    """Options of every storage tier; each tier plugin adds its own.

    The class attributes and ``lends`` describe the tier to the checks of a configuration, which
    make no tier. A plugin's option `capacity` is the bytes that one worker's blocks may take, its
    option `path` a folder that no two tiers share, with ``{worker}`` for the worker's id: both are
    checked against the rest of the configuration.
    """

    memory: ClassVar[Memory | None] = None
    """As ``StorageTier.memory``: tiers are listed fastest first, DRAM before FILE before OBJ. None:
    it depends on the machine."""
    asks_peers: ClassVar[bool] = False
    """As ``StorageTier.asks_peers``."""

    @property
    def lends(self) -> bool:
        """Whether the worker's blocks in a DRAM tier are lent to other workers."""
        return False

    prefetch: bool = setting(
        "Move blocks up from slower tiers early: blocks of requests that wait in the worker or in "
        "the front door, and of conversations that may continue. Only the fastest writable tier "
        "does so.",
        True,
    )
    compression: Literal["none", "zstd", "lz4"] = setting("How blocks are compressed.", "none")
    encryption_key: Secret | None = setting(
        "32, 48 or 64 hex digits: blocks, and what the tier keeps about them, are encrypted under "
        "keys derived from this one.",
        None,
    )
    integrity_key: Secret | None = setting(
        "As encryption_key, but everything stays readable: a writer to the medium cannot "
        "give it other blocks. One of the two keys; encryption does this, too.",
        None,
        validator=_alone,
    )
    read_keys: tuple[Secret, ...] = setting(
        "Further keys whose blocks are read and not written, to change encryption_key or "
        "integrity_key.",
        (),
        validator=_beside_a_key,
    )
    load_timeout_s: PositiveSeconds = setting(
        "A load that takes longer is aborted, and the blocks are computed.", 5.0
    )
    stall_timeout_s: PositiveSeconds = setting("A load without a block for so long ends.", 1.5)
    store_timeout_s: PositiveSeconds = setting("A store that takes longer is aborted.", 60.0)
    max_attempts: PositiveInt = setting(
        "How often a load or store of a block is tried in total.", 2
    )
    max_bytes_per_s: Size | None = setting(
        'Limit of bytes moved per second, such as "500MB"; none by default.', None
    )
    max_failures: PositiveInt = setting(
        "After this many failed jobs in a row the tier is not used for a while.", 3
    )
