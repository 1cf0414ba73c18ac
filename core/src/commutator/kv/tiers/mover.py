"""Moves blocks between local memory and one tier's slots, and within local memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from commutator.contract.tier import Direction, Memory, RemoteAgent, Slot, Span, StorageTier
from commutator.errors import TransferError, TransferTimeoutError
from commutator.kv.arena import Arena
from commutator.kv.tiers.block_io import IoContext
from commutator.nixl.agent import TransferAgent
from commutator.nixl.moves import BlockMove, lanes_worth, move_blocks, shares

__all__ = ["LocalMover", "TierMover"]

LOCAL_BACKEND = "UCX"
_BATCH_BYTES = 4 << 20
"""Small enough that bytes are still in the CPU's last-level cache when they are summed."""

_IN_FLIGHT_BYTES = 32 << 20
"""Most bytes in flight at once, for each lane."""

_MEMORY_TIMEOUT_S = 60.0
"""Copies within memory get a long limit: after a time-out their memory cannot be reused."""

_PART_BYTES = 8 << 20
"""Lanes take parts of about this size in turn, so that they end at nearly the same time."""


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
        local_memory: Memory,
        *,
        in_flight_bytes: int = _IN_FLIGHT_BYTES,
    ) -> None:
        """The tier's and the local memory's regions are registered with each agent."""
        self._agents = agents
        self._tier = tier
        self._local_memory = local_memory
        self._in_flight_bytes = in_flight_bytes
        self._lanes = ThreadPoolExecutor(max(1, len(agents) - 1), thread_name_prefix="kv-lane")
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
        results: list[TransferError | None] = [None] * len(pieces)
        for peer, positions in self._by_peer(pieces).items():
            errors = self._move_with(
                peer, direction, [pieces[position] for position in positions], context,
                _of(positions, on_moved),
            )  # fmt: skip
            for position, error in zip(positions, errors, strict=True):
                results[position] = error
                if isinstance(error, TransferTimeoutError) and error.token is not None:
                    self._held.setdefault(pieces[position][1], set()).add(error.token)
        return results

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
    ) -> list[TransferError | None]:
        """Each lane takes one part after another. All calls of the tier come first."""
        moves = self._plan(pieces)
        size_bytes = sum(move.local.size_bytes for move in moves)
        lanes = lanes_worth(len(moves), size_bytes, len(self._agents))
        # A list's iterator may serve several threads.
        parts = 1 if lanes == 1 else max(lanes, size_bytes // _PART_BYTES)
        left = iter(shares(len(moves), parts))
        errors: list[TransferError | None] = [None] * len(moves)

        def work(agent: TransferAgent) -> None:
            for part in left:
                errors[part.start : part.stop] = self._move(
                    agent, direction, moves[part.start : part.stop], peer, context,
                    _of(part, on_moved),
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

    def _plan(self, pieces: Sequence[tuple[Span, Slot, int]]) -> list[BlockMove]:
        place, step = self._tier.place, self._tier.alignment_bytes
        moves = []
        for local, slot, needed_bytes in pieces:
            size_bytes = needed_bytes + -needed_bytes % step
            remote, region = place(slot, size_bytes)
            padded = Span(local.address, size_bytes, local.device)
            moves.append(BlockMove(padded, remote, region))
        return moves

    def _move(
        self,
        agent: TransferAgent,
        direction: Direction,
        moves: Sequence[BlockMove],
        peer: RemoteAgent | None,
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None],
    ) -> list[TransferError | None]:
        try:
            name = None if peer is None else agent.add_peer(peer.metadata)
        except TransferError as error:
            return [error] * len(moves)
        errors = move_blocks(
            agent,
            direction,
            moves,
            local_memory=self._local_memory,
            remote_memory=self._tier.memory,
            backend=self._tier.backend,
            timeout_s=context.remaining_s,
            peer=name,
            batch_bytes=_BATCH_BYTES,
            max_in_flight_bytes=self._in_flight_bytes,
            on_done=on_moved,
            cancelled=context.cancelled,
        )
        if name is not None and any(errors):
            # A broken connection stays broken: the next move makes a new one.
            with suppress(TransferError):
                agent.remove_peer(name)
        return errors

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

    def pull(self, pairs: Sequence[tuple[Span, Span]]) -> list[TransferError | None]:
        """Copy each engine span to the scratch span beside it."""
        return self._copy(Direction.WRITE, pairs)

    def push(self, pairs: Sequence[tuple[Span, Span]]) -> list[TransferError | None]:
        """Copy each scratch span to the engine span beside it."""
        return self._copy(Direction.READ, pairs)

    def _copy(
        self, direction: Direction, pairs: Sequence[tuple[Span, Span]]
    ) -> list[TransferError | None]:
        moves: list[BlockMove] = []
        owners: list[int] = []
        for position, (engine, scratch) in enumerate(pairs):
            address = scratch.address
            for piece in self._engine.pieces(engine):
                there = Span(address, piece.size_bytes, scratch.device)
                moves.append(BlockMove(piece, there))
                owners.append(position)
                address += piece.size_bytes
        errors = move_blocks(
            self._agent,
            direction,
            moves,
            local_memory=self._engine.memory,
            remote_memory=Memory.DRAM,
            backend=LOCAL_BACKEND,
            timeout_s=_MEMORY_TIMEOUT_S,
        )
        results: list[TransferError | None] = [None] * len(pairs)
        for position, error in zip(owners, errors, strict=True):
            results[position] = results[position] or error
        return results


def _of(
    positions: Sequence[int], on_moved: Callable[[Sequence[int]], None]
) -> Callable[[Sequence[int]], None]:
    """``on_moved`` for a caller that numbers only the blocks in ``positions``."""
    return lambda done: on_moved([positions[index] for index in done])
