"""A worker whose lease lapsed: how long its requests stay with it, whatever it answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from tests.support.supervised import INFO
from tests.support.virtual_time import VirtualTimeLoop

from commutator.contract.registry import LAPSED
from commutator.contract.worker import EngineInfo, EngineLoad, WorkerRecord
from commutator.errors import EngineUnavailableError
from commutator.routing.workers import (
    MAX_PROBE_FAILURES,
    PROBE_EVERY_S,
    PROBE_TIMEOUT_S,
    LiveWorkers,
)

GONE_S = MAX_PROBE_FAILURES * (PROBE_EVERY_S + PROBE_TIMEOUT_S)
RECORD = WorkerRecord(worker_id="w", engine="e", kind="k", model="m", address="a", info=INFO)


class Client:
    """Answers probes as ``script`` says, then for ever as its last entry does."""

    def __init__(self, script: list[str]) -> None:
        self.script = script
        self.probed: list[str] = []
        self.closed_s: float | None = None

    answers = True

    def watch_answers(self, changed: Callable[[], None]) -> None:
        """It always answers pings."""

    async def start(self) -> EngineInfo:
        return INFO

    async def load(self) -> EngineLoad:
        self.probed.append(self.script[min(len(self.probed), len(self.script) - 1)])
        if self.probed[-1] == "refuses":
            raise EngineUnavailableError("connection refused")
        if self.probed[-1] == "hangs":
            await asyncio.sleep(3600)
        return EngineLoad()

    async def close(self) -> None:
        self.closed_s = asyncio.get_running_loop().time()


@given(
    script=st.lists(st.sampled_from(["answers", "refuses", "hangs"]), min_size=1, max_size=12),
    lengths_s=st.lists(st.floats(0.1, 30.0), max_size=4),
    reason=st.sampled_from([LAPSED, "failed", "stopped"]),
)
def test_requests_stay_while_the_worker_answers_and_no_longer(
    script: list[str], lengths_s: list[float], reason: str
) -> None:
    async def live() -> None:
        workers, client = LiveWorkers(), Client(script)
        worker = await workers.put(RECORD, cast(Any, client))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        worker.requests = len(lengths_s)

        def end_one() -> None:
            worker.requests -= 1

        for length_s in lengths_s:
            loop.call_later(length_s, end_one)
        await workers.remove("w", reason)
        assert workers.routable("m") == ()
        assert worker.gone == reason
        if reason != LAPSED or not lengths_s:
            assert client.closed_s == began_s
            return
        while client.closed_s is None:
            await asyncio.sleep(0.05)
            assert loop.time() < began_s + max(lengths_s) + GONE_S
        broken = bool(worker.requests)
        tail = client.probed[-MAX_PROBE_FAILURES:]
        failed = len(tail) == MAX_PROBE_FAILURES and "answers" not in tail
        assert failed or not broken, "requests are broken only when the worker does not answer"
        if "answers" not in script:
            assert client.closed_s <= began_s + GONE_S
        await asyncio.sleep(60.0)
        assert len(client.probed) <= (max(lengths_s) + GONE_S) / PROBE_EVERY_S, "probes end"

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(live())
