"""The blocks of an arena, in one tier: stored and loaded as an engine's are."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256

from commutator.contract.block import BlockDescriptor
from commutator.errors import CommutatorError
from commutator_engine_kit.kv.arena import Arena
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import Staging
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.mover import IoContext
from commutator_engine_kit.kv.tiers.setup import TierSetup

__all__ = ["TierBlocks", "new_keys"]

_TIMEOUT_S = 120.0


def new_keys(count: int) -> list[bytes]:
    """Keys of blocks that no tier has."""
    run = uuid.uuid4().hex
    return [sha256(f"{run}/{index}".encode()).digest() for index in range(count)]


class TierBlocks:
    """Each block of ``arena`` by its number; ``bench`` names the agent."""

    def __init__(self, setup: TierSetup, arena: Arena, bench: str) -> None:
        self.setup = setup
        self.keys = new_keys(arena.count)
        self._spans = [arena.span(index) for index in range(arena.count)]
        self._executor = TierExecutor(
            setup,
            arena,
            Staging(arena.block_bytes, 1),
            block_tokens=1,
            identity=self.keys[0].hex(),
            agent_name=f"{bench}-{uuid.uuid4().hex}",
            on_open=lambda _: None,
        )

    @contextmanager
    def opened(self) -> Iterator[None]:
        """The tier is open, and in the end without these blocks."""
        try:
            self._executor.open()
            try:
                yield
            finally:
                self._executor.free(self.keys)
        finally:
            self._executor.close()

    def store(self, blocks: Sequence[int]) -> None:
        """Raises CommutatorError unless all are stored."""
        outcome = self._executor.store(
            [BlockDescriptor(key=self.keys[i], parent=None, token_ids=(0,)) for i in blocks],
            [self._spans[i] for i in blocks],
            IoContext(time.monotonic() + _TIMEOUT_S),
            from_engine=True,
        )
        if outcome.failed:
            reason = next(iter(outcome.failed.values()))
            raise CommutatorError(f"{self.setup.name}: a block was not stored: {reason}")

    def load(self, blocks: Sequence[int]) -> list[LoadResult]:
        return self._executor.load(
            [self.keys[i] for i in blocks],
            [self._spans[i] for i in blocks],
            IoContext(time.monotonic() + _TIMEOUT_S),
            to_engine=True,
        )

    def free(self, blocks: Sequence[int]) -> None:
        self._executor.free([self.keys[i] for i in blocks])
