"""Moves blocks between local memory and one tier's slots, and local memory among itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

from commutator.errors import TransferError, TransferTimeoutError
from commutator.kv.block_io import IoContext
from commutator.kv.scattered_arena import Arena
from commutator.kv.tier import Peer, Slot, StorageTier
from commutator.transfer import BlockMove, Direction, Memory, Span, TransferAgent, move_blocks

__all__ = ["LocalMover", "TierMover"]

LOCAL_BACKEND = "UCX"
_FILE_BATCH_BYTES = 4 << 20
_MEMORY_BATCH_BYTES = 8 << 20
_LANE_BYTES = 2 << 20
"""Less is moved sooner than another thread wakes up."""
_MEMORY_TIMEOUT_S = 60.0
"""Copies within a machine's memory are not given up: nothing else could use the memory then."""


class TierMover:
    """Belongs to the tier's thread. Remembers which slots NIXL may still touch after a time-out.

    With several agents, each moves its part of the blocks, on a thread of its own but for the
    first: where a CPU copies, one is slower than memory.
    """

    def __init__(
        self,
        agents: Sequence[TransferAgent],
        tier: StorageTier,
        local_memory: Memory,
        *,
        in_flight_bytes: int,
    ) -> None:
        """Each agent has the tier's and the local memory's regions registered."""
        self._agents = agents
        self._tier = tier
        self._local_memory = local_memory
        self._in_flight_bytes = in_flight_bytes
        self._lanes = ThreadPoolExecutor(max(1, len(agents) - 1), thread_name_prefix="kv-lane")
        self._held: dict[Slot, set[int]] = {}
        """The tokens of transfers that were given up, by the slots that NIXL may still touch."""
        self._waiting: list[tuple[Slot, Callable[[], None]]] = []

    def move(
        self,
        direction: Direction,
        pieces: Sequence[tuple[Span, Slot, int]],
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None] = lambda _: None,
    ) -> list[TransferError | None]:
        """Move (local span, slot, bytes) each; None for each that was moved, or why it was not.

        ``on_moved`` is told the positions of blocks that have arrived while others are under way,
        on the thread that moved them.
        """
        results: list[TransferError | None] = [None] * len(pieces)
        for peer, positions in self._by_peer(pieces).items():

            def plan(
                agent: TransferAgent, part: Sequence[int], peer: Peer | None = peer
            ) -> Callable[[], list[TransferError | None]]:
                def arrived(done: Sequence[int]) -> None:
                    on_moved([part[index] for index in done])

                moves = [self._plan(*pieces[position]) for position in part]
                return lambda: self._move(agent, direction, moves, peer, context, arrived)

            size_bytes = sum(pieces[position][2] for position in positions)
            moved = self._in_lanes(plan, positions, size_bytes)
            for position, error in zip(positions, moved, strict=True):
                results[position] = error
                if isinstance(error, TransferTimeoutError) and error.token is not None:
                    self._held.setdefault(pieces[position][1], set()).add(error.token)
        return results

    def _by_peer(
        self, pieces: Sequence[tuple[Span, Slot, int]]
    ) -> Mapping[Peer | None, Sequence[int]]:
        """The positions of the blocks that lie with each peer."""
        if not self._tier.asks_peers:
            return {None: range(len(pieces))}
        by_peer: dict[Peer | None, list[int]] = {}
        for position, (_, slot, _) in enumerate(pieces):
            by_peer.setdefault(self._tier.peer(slot), []).append(position)
        return by_peer

    def _plan(self, local: Span, slot: Slot, needed_bytes: int) -> BlockMove:
        size_bytes = needed_bytes + -needed_bytes % self._tier.alignment_bytes
        remote, region = self._tier.place(slot, size_bytes)
        if size_bytes != local.size_bytes:
            local = Span(local.address, size_bytes, local.device)
        return BlockMove(local, remote, region)

    def _in_lanes(
        self,
        plan: Callable[[TransferAgent, Sequence[int]], Callable[[], list[TransferError | None]]],
        positions: Sequence[int],
        size_bytes: int,
    ) -> list[TransferError | None]:
        """Only moves are made beside each other: what a tier is asked, it is asked here."""
        lanes = max(1, min(len(self._agents), len(positions), size_bytes // _LANE_BYTES))
        each = -(-len(positions) // lanes)
        parts = [positions[number * each : (number + 1) * each] for number in range(lanes)]
        others = [
            self._lanes.submit(plan(agent, part))
            for agent, part in zip(self._agents[1:], parts[1:], strict=False)
        ]
        try:
            moved = plan(self._agents[0], parts[0])()
        except BaseException:
            wait(others)  # they use the same memory
            raise
        for other in others:
            moved += other.result()
        return moved

    def _move(
        self,
        agent: TransferAgent,
        direction: Direction,
        moves: Sequence[BlockMove],
        peer: Peer | None,
        context: IoContext,
        on_moved: Callable[[Sequence[int]], None],
    ) -> list[TransferError | None]:
        try:
            name = None if peer is None else agent.add_peer(peer.metadata)
        except TransferError as error:
            return [error] * len(moves)
        in_memory = self._tier.memory is Memory.DRAM
        errors = move_blocks(
            agent,
            direction,
            moves,
            local_memory=self._local_memory,
            remote_memory=self._tier.memory,
            backend=self._tier.backend,
            timeout_s=context.remaining_s,
            peer=name,
            batch_bytes=_MEMORY_BATCH_BYTES if in_memory else _FILE_BATCH_BYTES,
            max_in_flight_bytes=self._in_flight_bytes,
            on_done=on_moved,
            cancelled=context.cancelled,
        )
        if name is not None and any(errors):
            # A connection that broke stays so: the next move makes a new one.
            with suppress(TransferError):
                agent.remove_peer(name)
        return errors

    def is_held(self, slot: Slot) -> bool:
        """Whether NIXL may still touch the slot, and the local memory that was moved with it."""
        return slot in self._held

    def when_let_go(self, slot: Slot, call: Callable[[], None]) -> None:
        """Call once nothing touches the slot: now, or from ``let_go``."""
        if slot in self._held:
            self._waiting.append((slot, call))
        else:
            call()

    @property
    def has_held(self) -> bool:
        """Whether ``let_go`` may have something to do."""
        return bool(self._held)

    def let_go(self, over: AbstractSet[int]) -> None:
        """Tokens of transfers, this mover's or another's, that ``TransferAgent.reap`` returned."""
        left = {slot: tokens - over for slot, tokens in self._held.items()}
        self._held = {slot: tokens for slot, tokens in left.items() if tokens}
        ready = [call for slot, call in self._waiting if slot not in self._held]
        self._waiting = [(slot, call) for slot, call in self._waiting if slot in self._held]
        for call in ready:
            call()


class LocalMover:
    """Copies between the engine's memory and scratch memory, by NIXL too: it may be a GPU's."""

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
