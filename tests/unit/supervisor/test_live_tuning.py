"""Tuning live: front doors get values and report by them; no restart leaves a trial behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attrs import define, evolve, field
from tests.unit.planner.test_tuning import OPTIONS, arms

from commutator.contract.planner import PlannedWorker, WorkerPhase
from commutator.contract.tuning import ArmCounts, Trial
from commutator.contract.worker import Role
from commutator_tuning.config import TrialsConfig
from commutator_tuning.live import LiveTuning
from commutator_tuning.tuner import Finding, Tried, Tuner

CONFIG = TrialsConfig(mode="act")
READY = PlannedWorker(worker_id="w-0", role=Role.BOTH, phase=WorkerPhase.READY, age_s=9.0)


@define
class Search:
    """Finds what it is told to, or fails."""

    found: Finding | Exception = Finding(tried=[Tried(option="a", value=400, gain=0.2)])
    asked: list[tuple[Mapping[str, float], Mapping[Role, int]]] = field(factory=list)
    cancelled: int = 0
    hangs: bool = False

    async def search(
        self, tuning: TrialsConfig, values: Mapping[str, float], fleet: Mapping[Role, int]
    ) -> Finding:
        self.asked.append((values, fleet))
        try:
            await asyncio.sleep(1e6 if self.hangs else 0)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


@define
class Rig:
    file: Path | None = None
    search: Search = field(factory=Search)
    options: Mapping[str, Any] = OPTIONS
    live: LiveTuning = field(init=False)
    now_s: float = 0.0

    def __attrs_post_init__(self) -> None:
        config = evolve(CONFIG, state_file=None if self.file is None else str(self.file))
        self.live = LiveTuning(config, Tuner(config, self.options), self.search.search)

    async def step(
        self, seconds: float, counted: tuple[ArmCounts, ArmCounts] | None = None, workers: int = 1
    ) -> list[str]:
        self.now_s += seconds
        trial = self.trial
        seen = {} if counted is None or trial is None else {trial.number: counted}
        told = self.live.step(self.now_s, seen, [READY] * workers)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return list(told)

    @property
    def trial(self) -> Trial | None:
        """As front doors get it."""
        packed = json.loads(json.dumps(self.live.status()))["trial"]
        return None if packed is None else msgspec.convert(packed, Trial)

    @property
    def values(self) -> Mapping[str, float]:
        values: Mapping[str, float] = self.live.status()["values"]
        return values

    async def try_out(self) -> list[str]:
        told = [*await self.step(0.0), *await self.step(CONFIG.pause_s)]
        return [*told, *await self.step(1.0)]

    async def settle(self) -> None:
        await self.try_out()
        await self.step(300.0, arms((1800, 40), (200, 2)))
        while self.trial is not None:
            await self.switch()

    async def switch(self) -> list[str]:
        """Go through one period of a switchback; with the value requests fare better."""
        assert self.trial is not None
        nothing, (off, on) = ArmCounts(), arms((100, 2), (100, 1), (0.5, 0.3))
        counted = (nothing, on) if self.trial.share else (off, nothing)
        await self.step(50.0)
        return await self.step(100.0, counted)


async def test_a_value_is_searched_tried_and_settled_with_a_line_for_each() -> None:
    rig = Rig()
    (tried,) = await rig.try_out()
    assert tried.startswith("tuning, tried: a 100 -> 400 for 10% of requests")
    assert rig.search.asked == [({}, {Role.BOTH: 1})]
    assert rig.values == {}
    (line,) = await rig.step(300.0, arms((1800, 40), (200, 2), (0.5, 0.3)))
    assert line.startswith("tuning, promoted: a 100 -> 400 for all requests in one of each two")
    for number in range(2, 13):
        assert rig.trial is not None
        assert rig.trial.number == number, "front doors count for each period anew"
        assert await rig.switch() == []
    (line,) = await rig.switch()
    assert line.startswith("tuning, settled: a 100 -> 400 for all requests")
    assert rig.values == {"a": 400}
    assert rig.live.status()["trial"] is None
    steps = rig.live.status()["steps"]
    assert {kind: number for kind, number in steps.items() if number} == {
        "tried": 1,
        "promoted": 1,
        "settled": 1,
    }


async def test_requests_of_an_earlier_stage_do_not_count() -> None:
    rig = Rig()
    await rig.try_out()
    rig.now_s += 300.0
    assert rig.live.step(rig.now_s, {0: arms((1800, 40), (200, 2), (0.5, 0.1))}, [READY]) == []
    assert rig.live.status()["arms"][1]["ended"] == 0


async def test_a_restart_in_the_middle_of_a_canary_rolls_back_and_keeps_what_was_settled(
    tmp_path: Path,
) -> None:
    file = tmp_path / "tuning.json"
    rig = Rig(file)
    await rig.settle()
    rig.search.found = Finding(tried=[Tried(option="b", value=8, gain=0.2)])
    await rig.try_out()
    assert rig.trial is not None
    assert json.loads(file.read_text())["trial"]["before"] == 2, "kept before it is tried"
    again = Rig(file)  # the planner was killed
    assert await again.step(0.0) == [
        "tuning, b stays 2: 8 rolled back, as the planner ended meanwhile",
        "tuning, as before: a=400",
    ]
    assert (again.values, again.trial) == ({"a": 400}, None)
    assert json.loads(file.read_text())["trial"] is None
    third = Rig(file)
    assert await third.step(0.0) == ["tuning, as before: a=400"]


async def test_without_a_state_file_a_restart_has_the_configured_values() -> None:
    rig = Rig()
    await rig.settle()
    assert rig.values == {"a": 400}
    again = Rig()
    await again.step(0.0)
    assert again.values == {}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"values": {"a": 5}}'])
async def test_a_state_file_that_cannot_be_used_is_told_and_replaced(
    tmp_path: Path, text: str
) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text)
    rig = Rig(file)
    (told,) = await rig.step(0.0)
    assert "cannot be used, so nothing is tuned yet" in told
    await rig.settle()
    assert json.loads(file.read_text())["values"]["a"] == {"value": 400, "configured": 100}


async def test_a_state_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "missing" / "tuning.json")
    await rig.settle()
    assert rig.values == {"a": 400}


async def test_a_search_that_fails_is_told() -> None:
    rig = Rig()
    rig.search.found = OSError("no room")
    (told,) = await rig.try_out()
    assert told == "tuning, searched: no value was looked for: the search failed: no room"
    assert rig.trial is None


async def test_where_another_planner_acts_the_search_and_the_trial_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "tuning.json", Search(hangs=True))
    await rig.step(0.0)
    await rig.step(CONFIG.pause_s)
    rig.live.forget()
    await asyncio.sleep(0)
    assert rig.search.cancelled == 1
    rig.search.hangs = False
    await rig.try_out()
    assert rig.trial is not None
    rig.live.forget()
    assert rig.live.status()["trial"] is None
    assert "rolled back" in (await rig.step(5.0))[0], "as it acts again"


async def test_a_worker_more_ends_the_trial() -> None:
    rig = Rig()
    await rig.try_out()
    (told,) = await rig.step(5.0, workers=2)
    assert told.startswith(
        "tuning, rolled back: a stays 100: 400 rolled back, as the fleet changed"
    )
