"""TensorRT-LLM's KV connector over tiers and ranks that fail: they are done without."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq
from attrs import evolve
from tests.support.faults import FaultyIo, IoFaults
from tests.support.trtllm.kv_executor import KvExecutor
from tests.support.trtllm.kv_pool import BLOCK_TOKENS

from commutator_engine_kit.kv.tiers.block_io import BlockIo
from commutator_engine_kit.kv.tiers.setup import TierSetup
from commutator_trtllm.kv_staging import Ranks, Stage, Staged, StageServer

DRAM = {"kind": "dram", "capacity": "1MB", "huge_pages": "off"}
PROMPT = [1] * 4 * BLOCK_TOKENS + [2]
TIMEOUT_S = 60.0


def serve(engine: KvExecutor) -> int:
    """The tokens that were loaded for the prompt, whose KV is compared."""
    engine.run(engine.arrive([1000 + engine.arrived] * 22 * BLOCK_TOKENS))
    request = engine.arrive(PROMPT)
    engine.step()
    matched = request.matched
    engine.run(request)
    return matched


def until(what: Callable[[], object]) -> None:
    for _ in range(6000):
        if what():
            return
        time.sleep(0.01)
    raise AssertionError("it does not become true")


@pytest.mark.slow
@pytest.mark.parametrize("faults", [IoFaults(fail=1.0), IoFaults(hang=1.0)])
def test_a_tier_that_dies_is_done_without(tmp_path: Path, faults: IoFaults) -> None:
    made: list[FaultyIo] = []

    def wrap(setup: TierSetup) -> TierSetup:
        def wrap_io(io: BlockIo) -> BlockIo:
            made.append(FaultyIo(io, IoFaults(), random.Random(0)))
            return made[-1]

        return evolve(setup, wrap_io=wrap_io)

    with KvExecutor(tmp_path, DRAM, wrap=wrap, wait_s="0.2") as engine:
        until(lambda: serve(engine) == 4 * BLOCK_TOKENS)
        for io in made:
            io.faults = faults
        for _ in range(3):
            assert serve(engine) == 0
        if faults.hang:  # its jobs end at deadlines of their own
            return
        for io in made:
            io.faults = IoFaults()
        until(lambda: serve(engine) == 4 * BLOCK_TOKENS)
        engine.settle()  # all host memory is back


def stage(number: int) -> Stage:
    return Stage(number, (1, 2), None, 0, 0.01)


def test_a_rank_that_is_stuck_is_waited_for_once() -> None:
    asked: list[int] = []
    go_on = threading.Event()

    def stuck(wanted: Stage) -> Staged:
        asked.append(wanted.number)
        go_on.wait(TIMEOUT_S)
        return Staged(wanted.number, 7)

    ears = [StageServer(lambda wanted: Staged(wanted.number, 5)), StageServer(stuck)]
    ranks = Ranks([ear.address for ear in ears])
    try:
        assert [ranks.stage(stage(number)) for number in (1, 2, 3)] == [0, 0, 0]
        until(lambda: asked)
        assert asked == [1]
        go_on.set()
        until(lambda: ranks.stage(stage(4)) == 5)  # the fewer of both
        assert asked[1] == 4
    finally:
        go_on.set()
        ranks.close()
        for ear in ears:
            ear.close()


def test_an_ear_survives_what_it_hears() -> None:
    def answer(wanted: Stage) -> Staged:
        if wanted.number == 1:
            raise RuntimeError("a bug")
        return Staged(wanted.number, 2)

    ear = StageServer(answer)
    ranks = Ranks([ear.address])
    try:
        stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        with stranger:
            stranger.connect(ear.address)
            stranger.send(b"what?")
            until(lambda: stranger.poll(100))
            assert stranger.recv() == b""
        assert ranks.stage(stage(1)) == 0
        until(lambda: ranks.stage(stage(2)) == 2)
    finally:
        ranks.close()
        ear.close()
