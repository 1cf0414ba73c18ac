"""A planner that cannot plan these engines is refused before anything starts, with what to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve

from commutator.config.model import Config
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.planner import PlannerBounds, PlannerBudget, PlannerConfig
from commutator.contract.routing import BusyConfig
from commutator.contract.worker import Role
from commutator.plugins import load_plugins
from commutator.supervisor.planner.setup import make_planner, planner_problems
from commutator_slo.config import PerformanceConfig

HOST = load_plugins()
SIM = HOST.engines.kinds["sim"].config_class
SLO = HOST.planners.kinds["slo"].config_class


def config_of(*engines: EngineConfig, planner: PlannerConfig | None = None, **busy: Any) -> Config:
    router = HOST.routers.kinds["round_robin"].config_class(
        kind="round_robin", busy=BusyConfig(**busy)
    )
    return Config(
        models=(ModelConfig(name="m", source="-"),),
        engines=engines or (SIM(kind="sim", name="w", model="m"),),
        router=router,
        planner=planner or SLO(kind="slo"),
    )


def problems(
    *engines: EngineConfig, planner: PlannerConfig | None = None, **busy: Any
) -> list[str]:
    return list(planner_problems(config_of(*engines, planner=planner, **busy), HOST))


def sims(*roles: str, **options: Any) -> Sequence[EngineConfig]:
    return [
        SIM(kind="sim", name=f"{role}{number}", model="m", role=role, **options)
        for number, role in enumerate(roles)
    ]


def test_simulated_workers_tell_how_fast_they_are() -> None:
    assert problems() == []
    (engine,) = sims("both", speedup=4)
    speed = HOST.engines.kinds["sim"].thing.performance(engine)
    assert speed is not None
    assert speed.prefill_tokens_per_s == 32_000
    assert speed.step_s == pytest.approx(0.0015)


@pytest.mark.parametrize("kind", ["reference", "sim"])
def test_engines_that_do_not_tell_need_the_option_performance(kind: str) -> None:
    engine = HOST.engines.kinds[kind].config_class(kind=kind, name="w", model="m")
    if kind == "sim":
        engine = evolve(engine, speedup="unlimited")
    (problem,) = problems(engine)
    assert problem.startswith("planner.performance: required")
    told = PerformanceConfig(prefill_tokens_per_s=500, step_s=0.1)
    assert problems(engine, planner=SLO(kind="slo", performance=told)) == []


@pytest.mark.parametrize(
    ("planner", "engines", "part"),
    [
        (SLO(kind="slo"), sims("both", "decode"), "both or decode, not the two"),
        (SLO(kind="slo"), sims("decode", "prefill"), "set the fewest to 1 or more"),
        (
            SLO(kind="slo", bounds=PlannerBounds(decode=(1, 3))),
            sims("both"),
            "planner.bounds.decode: no entry of `engines` has this role",
        ),
        (
            SLO(kind="slo", bounds=PlannerBounds(both=(4, 8)), budget=PlannerBudget(workers=3)),
            sims("both"),
            "planner.budget.workers: 3 is less than the 4 of bounds",
        ),
        (
            SLO(kind="slo", bounds=PlannerBounds(both=(0, 8))),
            sims("both"),
            "router.busy.max_queue_s (60)",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(
    planner: PlannerConfig, engines: Sequence[EngineConfig], part: str
) -> None:
    (problem,) = problems(*engines, planner=planner)
    assert part in problem


def test_to_zero_requests_may_wait_as_long_as_a_start_takes() -> None:
    to_zero = SLO(kind="slo", bounds=PlannerBounds(both=(0, 8)))
    assert config_of(planner=to_zero).scales_from_zero
    assert problems(planner=to_zero, max_active_requests=9, max_queue_s=120) == []
    assert problems(planner=evolve(to_zero, mode="advise")) == []
    assert not config_of().scales_from_zero


def test_a_planner_has_each_role_of_the_engines() -> None:
    config = config_of(*sims("decode", "prefill"))
    assert config.planner is not None
    state = make_planner(config, config.planner, HOST).begin()
    assert set(state.policy.roles) == {Role.DECODE, Role.PREFILL}
    assert config.serving_role is Role.DECODE
