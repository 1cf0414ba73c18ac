"""Both sides of vLLM's KV connector together: whatever happens, no request sees wrong KV."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tests.support.fake_vllm import BLOCK_TOKENS, WHOLE, FakeVllm
from tests.support.faults import damage
from tests.support.foreign_engine import dram, prompt

from commutator_engine_kit.kv import KvGroup, KvKind

_LONGEST = 30
_SLIDING = KvGroup(kind=KvKind.SLIDING, block_size=BLOCK_TOKENS, window=BLOCK_TOKENS + 3)
_CHUNKED = KvGroup(kind=KvKind.CHUNKED, block_size=BLOCK_TOKENS, window=2 * BLOCK_TOKENS)
_RECURRENT = KvGroup(kind=KvKind.RECURRENT, block_size=BLOCK_TOKENS)
_HALF = KvGroup(kind=KvKind.SLIDING, block_size=BLOCK_TOKENS // 2, window=3)


class Connector(RuleBasedStateMachine):
    workers = 1
    groups: tuple[KvGroup, ...] = WHOLE

    def __init__(self) -> None:
        super().__init__()
        count = len(self.groups)
        capacity = dram(f"{40 * count}KB")
        self.vllm = FakeVllm(capacity, blocks=12 * count, workers=self.workers, groups=self.groups)

    @rule(number=st.integers(0, 1), blocks=st.integers(3, 5), salt=st.sampled_from([None, "s"]))
    def arrives(self, number: int, blocks: int, salt: str | None) -> None:
        if len(self.vllm.requests) < 5:
            self.vllm.arrive([*prompt(number, blocks), 1], cache_salt=salt)

    @rule(steps=st.integers(1, 4))
    def goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self.vllm.step()
        for request in self.vllm.running():
            if request.num_tokens > _LONGEST:
                self.vllm.finish(request)

    @rule(data=st.data())
    def is_aborted(self, data: st.DataObject) -> None:
        alive = [some for some in self.vllm.requests if some.status != "finished"]
        if alive:
            self.vllm.finish(data.draw(st.sampled_from(alive)))

    @rule(data=st.data())
    def is_preempted(self, data: st.DataObject) -> None:
        if running := self.vllm.running():
            self.vllm.preempt(data.draw(st.sampled_from(running)))

    @rule(
        number=st.integers(0, 1),
        rank=st.integers(0, 1),
        block=st.integers(0, 2),
        group=st.integers(0, 2),
    )
    def is_damaged(self, number: int, rank: int, block: int, group: int) -> None:
        engine = self.vllm.engines[rank % self.workers]
        (setup,) = engine.connector.tiers
        chosen = group % len(self.groups)
        keys = engine.connector.lookups.keys(prompt(number, 5), group=chosen)
        (stored,) = setup.tier.lookup([keys[block]])
        if stored is not None:
            damage(setup.tier, stored, 3)

    @rule()
    def is_reset(self) -> None:
        self.vllm.scheduler.reset()

    def teardown(self) -> None:
        self.vllm.settle()
        self.vllm.close()


class TwoRanks(Connector):
    workers = 2


class Windows(Connector):
    groups = (WHOLE[0], _SLIDING, _CHUNKED)


class States(Connector):
    groups = (WHOLE[0], _RECURRENT, _HALF)


class StatesOfTwoRanks(Connector):
    workers = 2
    groups = (_RECURRENT, WHOLE[0], _SLIDING)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [Connector, TwoRanks, Windows, States, StatesOfTwoRanks])
def test_no_request_sees_wrong_kv(machine: type[Connector]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=12, stateful_step_count=30, deadline=None)
    )
