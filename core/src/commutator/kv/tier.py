"""The contract of a storage tier: an address space of slots that NIXL can read and write.

A tier says where a block's bytes go and remembers, durably if it can, which are valid. It moves no
bytes and decides nothing: the manager chooses what to keep and what to evict, and ``transfer``
moves the bytes of the slots that a tier names. The life of a slot:

    free --reserve--> reserved --(bytes are written and verified)--> commit --> committed
    reserved --release--> free              committed --evict--> free, once no reader pins it

Methods are called from one thread. They may touch metadata on disk or a catalogue; each says so.
``reserve`` and ``lookup`` answer per block: what cannot be done is None, never an exception.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

from attrs import frozen

from commutator.kv.export_options import ExportOptions
from commutator.kv.keys import BlockKey
from commutator.transfer.spans import Memory, Region, Span

__all__ = [
    "UNBOUNDED",
    "Peer",
    "Slot",
    "SlotGeometry",
    "StorageTier",
    "Stored",
    "TierStatistics",
]

UNBOUNDED = sys.maxsize
"""Capacity of a tier that sets no limit of its own."""

Slot = int
"""The number of a slot within its tier, from 0."""


@frozen(kw_only=True)
class SlotGeometry:
    """What a tier needs to know before it can lay out its slots."""

    block_bytes: int
    """Size of one KV block as the engine keeps it."""
    slot_bytes: int
    """Most bytes that will be written into one slot: the block, and a header where the tier is
    ``framed``, after encoding."""
    block_tokens: int = 0
    """Tokens in a full block: the most that ``Stored.token_ids`` will ever hold."""
    identity: str
    """Hex digest of the deployment's cache identity without adapter and salt, and of the codecs
    that the tier's blocks go through: what lies on a shared or persistent medium under another
    identity is not ours."""


@frozen(kw_only=True)
class Stored:
    """A committed block, as its tier remembers it."""

    key: BlockKey
    slot: Slot
    size_bytes: int
    """Bytes written into the slot."""
    checksum: int
    """xxh3_64 over those bytes; 0 where the bytes carry their own header (``framed``)."""
    parent: BlockKey | None = None
    """The key before it in its chain; None for a first block or where it is not known."""
    token_ids: tuple[int, ...] = ()
    """The block's tokens, so that routers can be told of it; empty where the tier does not keep
    them."""
    lora_name: str | None = None
    """The adapter it was computed with; None also where the tier does not keep it."""
    tenant: str | None = None
    """The cache salt of the request that it was computed for; None also where the tier does not
    keep it."""


@frozen(kw_only=True)
class TierStatistics:
    """How full a tier is, in slots."""

    capacity: int
    """``UNBOUNDED`` where the tier sets no limit of its own."""
    committed: int
    reserved: int
    pinned: int
    damaged: int = 0
    """Blocks of a former life that were lost or not intact when the tier was opened."""


@frozen
class Peer:
    """Another process's NIXL agent, whose memory holds a slot's bytes."""

    name: str
    metadata: bytes
    """What ``TransferAgent.add_peer`` needs to know. From a process that is trusted."""


class StorageTier(ABC):
    """One storage tier. ``SlotTier`` implements all but where the bytes lie."""

    medium: str
    """The word for it in KV events, such as "CPU" or "NVME"; see ``kv.medium``."""
    memory: Memory
    backend: str
    """The NIXL backend that moves its bytes: "UCX", "POSIX", "OBJ", ..."""
    framed: bool = False
    """Whether the stored bytes begin with a header that tells their key and checksum, because the
    tier itself does not keep them."""
    shared: bool = False
    """Whether others write to the same medium, so that a block unknown here may still be there."""
    writable: bool = True
    """Whether blocks can be stored there at all, not only read."""
    asks_peers: bool = False
    """Whether it reads from other workers, and so needs ``use_peers``."""
    alignment_bytes: int = 1
    """Direct I/O: sizes given to ``place``, and the memory on the other side, must be multiples of
    this, or NIXL fails to move them. May change with ``open``."""

    def use_peers(self, find: Callable[[], Sequence[str]]) -> None:
        """Called before ``open``, for tiers that ask other workers.

        ``find`` tells the addresses where workers export blocks now (see ``kv.peer_export``). Any
        thread may call it, and it never waits.
        """

    @property
    def export_options(self) -> ExportOptions | None:
        """How this worker's blocks in host memory are to be lent to its peers; None: not at all."""
        return None

    @property
    @abstractmethod
    def backend_parameters(self) -> Mapping[str, str]:
        """What the NIXL backend is created with. May hold secrets: never print it."""

    @abstractmethod
    def open(self, geometry: SlotGeometry) -> Sequence[Stored]:
        """Get memory, files or a connection, and return every block that a former life committed.

        Slow; may touch the disk or the network. Raises TierError, saying what to do, when the tier
        cannot be used at all.
        """

    @abstractmethod
    def regions(self) -> Sequence[Region]:
        """What to register with NIXL once, after ``open``; empty when every span needs its own."""

    @abstractmethod
    def reserve(self, keys: Sequence[BlockKey]) -> list[Slot | None]:
        """A free slot for each key, to be written; None where there is none or it is there already.

        In memory only.
        """

    @abstractmethod
    def place(self, slot: Slot, size_bytes: int) -> tuple[Span, Region | None]:
        """Where the first ``size_bytes`` of a reserved or committed slot lie.

        The region is what must be registered for this span alone; None when ``regions`` has it.
        """

    @abstractmethod
    def commit(self, blocks: Iterable[Stored]) -> None:
        """Make reserved slots valid: their bytes were written. Durable where the tier is.

        Raises TierError when the metadata cannot be written; the slots are then still reserved.
        ValueError when a slot is not reserved for its block's key.
        """

    @abstractmethod
    def lookup(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        """The committed block of each key, as this process knows it. In memory only."""

    def probe(self, keys: Sequence[BlockKey]) -> list[Stored | None]:
        """Like ``lookup``, but asks the medium where it is ``shared``. May wait for the network.

        ``keys`` are one chain from its beginning, as nothing behind a missing block can be used:
        what lies behind it need not be asked for. A block that is found stays known to ``lookup``.
        Raises TierError when the medium cannot be asked, now.
        """
        return self.lookup(keys)

    def peer(self, slot: Slot) -> Peer | None:
        """Whose memory the slot's span names; None: the medium's own, or this process's.

        A slot of a peer's can only be read: name the peer to the transfer.
        """
        return None

    @abstractmethod
    def pin(self, slot: Slot) -> None:
        """Nothing else may use the slot until ``unpin``. Counted.

        For readers, and for a reserved slot that NIXL may still write to. Raises ValueError when
        the slot is free.
        """

    @abstractmethod
    def unpin(self, slot: Slot) -> None:
        """A reader is done."""

    @abstractmethod
    def release(self, slots: Iterable[Slot]) -> None:
        """Give reserved slots back: what was to be written will not be committed.

        Each is free as soon as nothing pins it.
        """

    @abstractmethod
    def evict(self, keys: Iterable[BlockKey]) -> None:
        """Forget committed blocks, durably; each slot is free as soon as nothing pins it.

        They are damaged, or nobody wants them: also what others stored on a ``shared`` medium goes.
        Unknown keys are passed over. Raises TierError when the metadata cannot be written; the
        blocks are then still committed.
        """

    def make_room(self, keys: Iterable[BlockKey]) -> None:
        """Like ``evict``, for blocks that are sound: only their slots are needed.

        Where the medium is ``shared``, what others stored there stays, and can be found again.
        """
        self.evict(keys)

    @abstractmethod
    def committed(self) -> Iterable[Stored]:
        """Every committed block."""

    @abstractmethod
    def statistics(self) -> TierStatistics:
        """How full it is."""

    @abstractmethod
    def close(self) -> None:
        """Let go of memory, files and connections. What was committed stays where it is durable."""
