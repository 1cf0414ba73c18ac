"""The engine loads an evicted prompt from a fast tier, and computes it where the tier is slow."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import pytest
from attrs import evolve
from tests.support.kv_rig import setups
from tests.support.reference_options import sized
from tests.support.tiered_engine import TieredEngine
from tests.support.tiny_llama import tiny_model
from torch import Tensor

from commutator.contract.tier import StoredBlock
from commutator_engine_kit.kv.block_manager.actions import LoadResult
from commutator_engine_kit.kv.tiers.block_io import BlockIo, LoadBlock, StoreBlock, Unstored
from commutator_engine_kit.kv.tiers.mover import IoContext
from commutator_reference.arena import KVArena
from commutator_reference.model import Batch, LlamaModel
from commutator_reference.scheduler import Chunk

pytestmark = pytest.mark.slow

PROMPT = [random.Random(1).randrange(5, 95) for _ in range(61)]
BLOCKS = 15
"""Full blocks of the prompt."""
SLOW_S = 5.0
"""Far longer than computing it takes, also on a machine that does much else."""


class SlowToRead(BlockIo):
    """A medium that is far away."""

    def __init__(self, inner: BlockIo) -> None:
        self._inner = inner

    def store(
        self, blocks: Sequence[StoreBlock], context: IoContext
    ) -> list[StoredBlock | Unstored]:
        return self._inner.store(blocks, context)

    def load(self, blocks: Sequence[LoadBlock], context: IoContext) -> list[LoadResult]:
        time.sleep(SLOW_S)
        return self._inner.load(blocks, context)


class SlowToCompute(LlamaModel):
    """A model that is large for its machine."""

    def forward(
        self,
        batch: Batch,
        arena: KVArena,
        wanted: Callable[[], bool] = lambda: True,
        score: Callable[[Chunk, int, Tensor], None] | None = None,
    ) -> Tensor:
        time.sleep(SLOW_S * len(batch.token_ids) / len(PROMPT))
        return super().forward(batch, arena, wanted, score)


def ask(tiered: TieredEngine, key: int) -> list[int]:
    """The first token, once the engine's own memory has forgotten the prompt."""
    tiered.until_settled()
    tiered.engine.reset_prefix_cache()
    [said] = tiered.answers([PROMPT], 1, first_key=key, at_once=1)
    tiered.until_settled()
    return said


@pytest.mark.parametrize("slow", ["the tier", "the model"])
def test_the_second_time_the_faster_way_is_known(slow: str) -> None:
    model = tiny_model()
    [setup] = setups(
        {"kind": "dram", "capacity": "1MB", "load_timeout_s": 60, "stall_timeout_s": 60}
    )
    if slow == "the tier":
        setup = evolve(setup, wrap_io=SlowToRead)
    else:
        model.__class__ = SlowToCompute
    with TieredEngine(model, [setup], sized(num_blocks=64, block_size=4)) as tiered:
        said = ask(tiered, 0)
        assert ask(tiered, 1) == said
        assert tiered.loaded() == {"dram": BLOCKS}, "nothing is known of the tier: it is measured"
        assert ask(tiered, 2) == said
        [state] = tiered.connector.statistics().tiers
        if slow == "the tier":
            assert state.loads["loaded"] == BLOCKS
            assert state.not_loaded == {"slower than recompute": BLOCKS}
        else:
            assert state.loads["loaded"] == 2 * BLOCKS
            assert not state.not_loaded
