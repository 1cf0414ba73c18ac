"""Moves blocks between local memory and one tier's slots, and within local memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from attrs import define, field

from commutator.contract.tier import Direction, Memory, RemoteAgent, Slot, Span, StorageTier
from commutator.errors import TransferError, TransferTimeoutError
from commutator_engine_kit.kv.arena import Arena, BlockArena
from commutator_engine_kit.nixl.agent import TransferAgent, TransferPath
from commutator_engine_kit.nixl.moves import (
    BlockMove,
    MoveLimits,
    lanes_worth,
    move_blocks,
    shares,
    when_whole,
)

LOCAL_BACKEND = "UCX"
GPU_COPIES = {"ucx_error_handling_mode": "none"}
"""UCX's parameters for an agent that copies GPU memory within its process. By default UCX uses only
what notices a peer's end, and copies GPU memory by TCP: 0.6 GB/s on an H100; with these, 47."""

_BATCH_BYTES = 4 << 20
"""Small enough that bytes are still in the CPU's last-level cache when they are summed."""

_IN_FLIGHT_BYTES = 32 << 20
"""Most bytes in flight at once, for each lane."""

_MEMORY_TIMEOUT_S = 60.0
"""Copies within memory get a long limit: after a time-out their memory cannot be reused."""

_PART_BYTES = 8 << 20
"""Lanes take parts of about this size in turn, so that they end at nearly the same time."""


@define
class IoContext:
    """A job's deadline, and whether it was cancelled."""

    deadline_s: float
    """On ``time.monotonic``'s clock."""
    cancelled: Callable[[], bool] = field(default=lambda: False)
    stall_s: float = float("inf")
    """The job is over where no block arrives for so long."""

    @property
    def remaining_s(self) -> float:
        return max(0.0, self.deadline_s - time.monotonic())

    @property
    def over(self) -> bool:
        """Whether to stop: the deadline has passed, or the job was cancelled."""
        return self.cancelled() or self.remaining_s == 0


class TierMover:
    """Moves blocks to and from one tier. Used on the tier's thread.

    Tracks the slots that NIXL may still touch after a time-out. With several agents (lanes), each
    moves a share of the blocks on its own thread, the first on the tier's: one CPU copies slower
    than memory allows.
    """

    def __init__(
        self,
        agents: Sequence[TransferAgent],
        tier: StorageTier,
        arena: Arena,
    ) -> None:
        """The tier's and the arena's regions are registered with each agent.

        Local spans are those of ``arena``, and of parts of its blocks unless it is scattered.
        """
        self._agents = agents
        self._tier = tier
        self._arena = arena
        self._lanes = ThreadPoolExecutor(max(1, len(agents) - 1), thread_name_prefix="kv-lane")
        self.news_s = 0.0
        """When blocks last arrived, on ``time.monotonic``'s clock."""
        self._held: dict[Slot, set[int]] = {}
        """Tokens of transfers that timed out, by the slots that NIXL may still touch."""
        self._waiting: list[tuple[Slot, Callable[[], None]]] = []

    def move(
        self,
        direction: Direction,
        pieces: Sequence[tuple[Span, Slot, int]],
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[TransferError | None]:
        """Move each (local span, slot, bytes). None for each that was moved, or its error.

        ``on_moved`` gets the positions of moved blocks while others are in flight, on the thread
        that moved them.
        """

        def arrived(done: Sequence[int]) -> None:
            self.news_s = time.monotonic()
            on_moved(done)

        results: list[TransferError | None] = [None] * len(pieces)
        for peer, positions in self._by_peer(pieces).items():
            errors = self._move_with(
                peer, direction, [pieces[position] for position in positions], context,
                _renumbered(positions, arrived),
            )  # fmt: skip
            for position, found in zip(positions, errors, strict=True):
                results[position] = next(filter(None, found), None)
                for error in found:
                    if not isinstance(error, TransferTimeoutError):
                        continue
                    context.deadline_s = min(context.deadline_s, time.monotonic())
                    if error.token is not None:
                        self._held.setdefault(pieces[position][1], set()).add(error.token)
        return results

    def host_span(self, local: Span, slot: Slot) -> Span:
        """Where a block that moves directly is in host memory, on either side.

        The tier is in this process's memory, if the engine's blocks are not or are in pieces.
        """
        if isinstance(self._arena, BlockArena) and self._arena.memory is Memory.DRAM:
            return local
        return self._tier.place(slot, local.size_bytes)[0]

    def _by_peer(
        self, pieces: Sequence[tuple[Span, Slot, int]]
    ) -> Mapping[RemoteAgent | None, Sequence[int]]:
        """The positions of the blocks that each peer has; None: this process or the medium."""
        if not self._tier.asks_peers:
            return {None: range(len(pieces))}
        by_peer: dict[RemoteAgent | None, list[int]] = {}
        for position, (_, slot, _) in enumerate(pieces):
            by_peer.setdefault(self._tier.peer(slot), []).append(position)
        return by_peer

    def _move_with(
        self,
        peer: RemoteAgent | None,
        direction: Direction,
        pieces: Sequence[tuple[Span, Slot, int]],
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None],
    ) -> list[Sequence[TransferError | None]]:
        """Each block's errors. Lanes take one part after another; calls of the tier come first."""
        blocks = self._plan(pieces)
        size_bytes = sum(needed_bytes for _, _, needed_bytes in pieces)
        lanes = lanes_worth(len(blocks), size_bytes, len(self._agents))
        # A list's iterator may serve several threads.
        parts = 1 if lanes == 1 else max(lanes, size_bytes // _PART_BYTES)
        left = iter(shares(len(blocks), parts))
        errors: list[Sequence[TransferError | None]] = [()] * len(blocks)

        def work(agent: TransferAgent) -> None:
            for part in left:
                errors[part.start : part.stop] = self._move_blocks(
                    agent, direction, blocks[part.start : part.stop], peer, context,
                    _renumbered(part, on_moved),
                )  # fmt: skip

        others = [self._lanes.submit(work, agent) for agent in self._agents[1:lanes]]
        try:
            work(self._agents[0])
        except BaseException:
            wait(others)  # they use the same memory
            raise
        for other in others:
            other.result()
        return errors

    def _plan(self, pieces: Sequence[tuple[Span, Slot, int]]) -> list[list[BlockMove]]:
        """Each block's moves: one for each piece of it, all in one place of the tier."""
        place, step = self._tier.place, self._tier.alignment_bytes
        blocks = []
        for local, slot, needed_bytes in pieces:
            size_bytes = needed_bytes + -needed_bytes % step
            remote, region = place(slot, size_bytes)
            padded = Span(local.address, size_bytes, local.device)
            moves = _pairs(self._arena.pieces(padded), remote)
            blocks.append([BlockMove(here, there, region) for here, there in moves])
        return blocks

    def _move_blocks(
        self,
        agent: TransferAgent,
        direction: Direction,
        blocks: Sequence[Sequence[BlockMove]],
        peer: RemoteAgent | None,
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None],
    ) -> list[Sequence[TransferError | None]]:
        """Each block's errors; a block is moved once all its pieces are."""
        tier = self._tier
        try:
            name = None if peer is None else agent.add_peer(peer.metadata)
        except TransferError as error:
            return [(error,)] * len(blocks)
        moves = [move for block in blocks for move in block]
        if len(moves) > len(blocks):
            owners = [number for number, block in enumerate(blocks) for _ in block]
            on_moved = when_whole(owners, on_moved)
        found = move_blocks(
            agent,
            TransferPath(direction, self._arena.memory, tier.memory, tier.backend, name),
            moves,
            MoveLimits(
                timeout_s=context.remaining_s,
                batch_bytes=_BATCH_BYTES,
                max_in_flight_bytes=_IN_FLIGHT_BYTES,
                cancelled=context.cancelled,
                stall_s=context.stall_s,
            ),
            on_moved,
        )
        if name is not None and any(found):
            # A broken connection stays broken: the next move makes a new one.
            with suppress(TransferError):
                agent.remove_peer(name)
        errors = iter(found)
        return [[next(errors) for _ in block] for block in blocks]

    def in_flight(self, slot: Slot) -> bool:
        """Whether NIXL may still touch the slot, and the local memory that was moved with it."""
        return slot in self._held

    def on_released(self, slot: Slot, call: Callable[[], None]) -> None:
        """Call ``call`` once no transfer touches the slot: now, or from ``released``."""
        if slot in self._held:
            self._waiting.append((slot, call))
        else:
            call()

    @property
    def has_held(self) -> bool:
        """Whether any slot may still be touched by a transfer that timed out."""
        return bool(self._held)

    def released(self, over: AbstractSet[int]) -> None:
        """Release the slots of ended transfers; ``over`` has tokens of this mover or of others."""
        left = {slot: tokens - over for slot, tokens in self._held.items()}
        self._held = {slot: tokens for slot, tokens in left.items() if tokens}
        ready = [call for slot, call in self._waiting if slot not in self._held]
        self._waiting = [(slot, call) for slot, call in self._waiting if slot in self._held]
        for call in ready:
            call()


class LocalMover:
    """Copies between the engine's memory, which may be a GPU's, and scratch memory by NIXL."""

    def __init__(self, agent: TransferAgent, engine: Arena) -> None:
        self._agent = agent
        self._engine = engine

    def pull(self, blocks: Sequence[tuple[Span, Span]]) -> list[TransferError | None]:
        """Copy each engine span to the scratch span beside it."""
        return self._copy(Direction.WRITE, blocks)

    def push(self, blocks: Sequence[tuple[Span, Span]]) -> list[TransferError | None]:
        """Copy each scratch span to the engine span beside it."""
        return self._copy(Direction.READ, blocks)

    def _copy(
        self, direction: Direction, blocks: Sequence[tuple[Span, Span]]
    ) -> list[TransferError | None]:
        moves: list[BlockMove] = []
        owners: list[int] = []
        for position, (engine, scratch) in enumerate(blocks):
            for piece, there in _pairs(self._engine.pieces(engine), scratch):
                moves.append(BlockMove(piece, there))
                owners.append(position)
        errors = move_blocks(
            self._agent,
            TransferPath(direction, self._engine.memory, Memory.DRAM, LOCAL_BACKEND),
            moves,
            MoveLimits(timeout_s=_MEMORY_TIMEOUT_S),
        )
        results: list[TransferError | None] = [None] * len(blocks)
        for position, error in zip(owners, errors, strict=True):
            results[position] = results[position] or error
        return results


def _pairs(pieces: Sequence[Span], whole: Span) -> Iterator[tuple[Span, Span]]:
    """Each piece, and its place in ``whole``, where they lie one behind another."""
    address = whole.address
    for piece in pieces:
        yield piece, Span(address, piece.size_bytes, whole.device)
        address += piece.size_bytes


def _renumbered(
    positions: Sequence[int], on_moved: Callable[[Sequence[int]], None]
) -> Callable[[Sequence[int]], None]:
    """``on_moved`` for a caller that numbers only the blocks in ``positions``."""
    return lambda done: on_moved([positions[index] for index in done])
