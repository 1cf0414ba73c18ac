"""TensorRT-LLM's KV connector in the documented order of calls: no request sees wrong KV."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from tests.support.faults import FaultyIo, IoFaults, damage
from tests.support.trtllm.kv_executor import MOST_ANSWER, KvExecutor, LlmRequest
from tests.support.trtllm.kv_pool import BLOCK_TOKENS

from commutator_engine_kit.kv.tiers.block_io import BlockIo
from commutator_engine_kit.kv.tiers.setup import TierSetup

_DRAM = {"kind": "dram", "capacity": "100KB", "huge_pages": "off"}


def _prompt(number: int, blocks: int) -> list[int]:
    return [number] * BLOCK_TOKENS * blocks


class Connector(RuleBasedStateMachine):
    """Fewer pages than requests want, less host memory than they stage, tiers that evict, fail."""

    options: ClassVar[dict[str, Any]] = {"pages": 14, "chunk": 6, "staging": str(6 * 576)}

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.io: list[FaultyIo] = []
        folder = Path(self.folder.name)
        self.engine = KvExecutor(folder, _DRAM, wrap=self.wrap, **self.options)

    def wrap(self, setup: TierSetup) -> TierSetup:
        def wrap_io(io: BlockIo) -> BlockIo:
            self.io.append(FaultyIo(io, IoFaults(), random.Random(0)))
            return self.io[-1]

        return evolve(setup, wrap_io=wrap_io)

    @property
    def alive(self) -> list[LlmRequest]:
        return [*self.engine.waiting, *self.engine.running]

    @rule(
        number=st.integers(0, 1),
        blocks=st.integers(1, 5),
        salt=st.sampled_from([None, "s"]),
        facts=st.sampled_from([{}] * 6 + [{"is_dummy_request": True}, {"lora_task_id": 1}]),
    )
    def arrives(self, number: int, blocks: int, salt: str | None, facts: dict[str, Any]) -> None:
        if len(self.alive) < 5:
            tokens = [*_prompt(number, blocks), 1]
            self.engine.arrive(tokens, cache_salt=salt, **facts)

    @rule(steps=st.integers(1, 4))
    def goes_on(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()
            for request in list(self.engine.running):
                if len(request.tokens) >= request.prompt_len + MOST_ANSWER:
                    self.engine.finish(request)

    @rule(data=st.data())
    def is_cancelled(self, data: st.DataObject) -> None:
        if self.alive:
            self.engine.finish(data.draw(st.sampled_from(self.alive)))

    @rule(number=st.integers(0, 1), rank=st.integers(0, 1), block=st.sampled_from([None, 0, 1, 2]))
    def comes_again(self, number: int, rank: int, block: int | None) -> None:
        """It was stored, and has lost its pages; one of its blocks may be damaged."""
        for request in self.alive:
            self.engine.finish(request)
        self.engine.run(self.engine.arrive([*_prompt(number, 5), 1]))
        self.engine.settle()
        self.engine.run(self.engine.arrive([9] * 12 * BLOCK_TOKENS))
        for last in range(2):
            self.engine.arrive([*_prompt(number, 5), last])
        if block is None:
            return
        tiers = self.engine.workers[rank % len(self.engine.workers)]._connector
        (setup,) = tiers.tiers
        (stored,) = setup.tier.lookup([tiers.lookups.keys(_prompt(number, 5))[block]])
        if stored is not None:
            damage(setup.tier, stored, 3)

    @rule(fail=st.sampled_from([0.0, 0.0, 0.3]), short=st.sampled_from([0.0, 0.5]))
    def fails_now_and_then(self, fail: float, short: float) -> None:
        for io in self.io:
            io.faults = IoFaults(fail=fail, short=short)

    def teardown(self) -> None:
        for request in self.alive:
            self.engine.finish(request)
        self.engine.settle()
        self.engine.close()
        self.folder.cleanup()


class TwoRanks(Connector):
    options: ClassVar[dict[str, Any]] = {**Connector.options, "ranks": 2}


class SecondManager(Connector):
    """It may ask long before it allocates pages, allocate fewer, and take all of them back."""

    options: ClassVar[dict[str, Any]] = {**Connector.options, "grouped": True}

    @rule(data=st.data())
    def is_asked_early(self, data: st.DataObject) -> None:
        new = [request for request in self.engine.waiting if request.offer is None]
        if new:
            self.engine.ask(data.draw(st.sampled_from(new)))

    @rule(data=st.data())
    def is_preempted(self, data: st.DataObject) -> None:
        if self.engine.running:
            self.engine.preempt(data.draw(st.sampled_from(self.engine.running)))

    @rule(data=st.data())
    def is_reset(self, data: st.DataObject) -> None:
        if self.alive:
            self.engine.reset(data.draw(st.sampled_from(self.alive)))


class SecondManagerTwoRanks(SecondManager):
    options: ClassVar[dict[str, Any]] = {**SecondManager.options, "ranks": 2}


@pytest.mark.slow
@pytest.mark.proves("trtllm", "KV tiers: loaded blocks, the right tokens", how="stand-in")
@pytest.mark.parametrize("machine", [Connector, TwoRanks, SecondManager, SecondManagerTwoRanks])
def test_no_request_of_tensorrt_llm_sees_wrong_kv(machine: type[Connector]) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=8, stateful_step_count=25, deadline=None)
    )
