"""`need` never falls when demand grows, and never grows when a target is looser."""

from __future__ import annotations

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_fleet import SIM

from commutator.contract.planner import PlannerTargets, length_bucket
from commutator.contract.worker import Role
from commutator_slo.need import Demand, need

_lengths = st.dictionaries(
    st.integers(0, 100_000).map(length_bucket), st.floats(0.001, 1e4), min_size=1, max_size=5
)

demands = st.builds(
    Demand,
    requests_per_s=st.just(0.0) | st.floats(0.001, 500),
    prompt_lengths=_lengths,
    context_tokens=st.floats(0, 100_000),
    output_tokens=st.just(0.0) | st.floats(1, 5000),
    gap_variation=st.floats(0, 20),
    growth=st.floats(0.5, 10),
    backlog_tokens=st.integers(0, 10**7),
)
"""What a role may have to serve."""

targets = st.builds(
    PlannerTargets,
    ttft_s=st.floats(0.05, 20),
    itl_s=st.floats(0.005, 0.5),
    attainment=st.floats(0.5, 0.999),
)
roles = st.sampled_from(list(Role))
factors = st.floats(1.0, 5.0)
some = settings(deadline=None, max_examples=150)


def workers(role: Role, demand: Demand, target: PlannerTargets, factor: float = 1.0) -> int:
    return need(role, demand, SIM, target, 120.0, factor=factor)


@some
@given(roles, demands, targets, factors)
def test_more_requests_never_need_fewer_workers(
    role: Role, demand: Demand, target: PlannerTargets, factor: float
) -> None:
    more = evolve(demand, requests_per_s=demand.requests_per_s * factor)
    assert workers(role, more, target) >= workers(role, demand, target)
    assert workers(role, demand, target, factor) == workers(role, more, target)


@some
@given(roles, demands, targets, factors)
def test_burstier_arrivals_or_a_backlog_never_need_fewer(
    role: Role, demand: Demand, target: PlannerTargets, factor: float
) -> None:
    before = workers(role, demand, target)
    burstier = evolve(demand, gap_variation=demand.gap_variation * factor)
    behind = evolve(demand, backlog_tokens=int(demand.backlog_tokens * factor))
    assert workers(role, burstier, target) >= before
    assert workers(role, behind, target) >= before


@some
@given(roles, demands, targets, factors)
def test_looser_targets_never_need_more(
    role: Role, demand: Demand, target: PlannerTargets, factor: float
) -> None:
    before = workers(role, demand, target)
    for looser in (
        evolve(target, ttft_s=target.ttft_s * factor),
        evolve(target, itl_s=target.itl_s * factor),
        evolve(target, attainment=target.attainment / factor),
    ):
        assert workers(role, demand, looser) <= before
