"""The conformance suite for fairness policies: subclass it, define a factory, run pytest."""

from __future__ import annotations

import math
import pickle
from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.fairness import FairnessPolicy
from commutator_testing.profile import suite_settings

_PRINCIPALS = (None, "ada", "bea", "team/cyd")

_principals = st.sampled_from(_PRINCIPALS)

_steps = st.one_of(
    st.tuples(st.just("arrive"), _principals, st.floats(0.01, 100)),
    st.tuples(st.just("admit"), _principals),
    st.tuples(st.just("charge"), _principals, st.integers(-50, 5000), st.integers(0, 500)),
)

Step = tuple[str, str | None] | tuple[str, str | None, float] | tuple[str, str | None, int, int]

_histories = st.lists(_steps, max_size=60)

_settings = suite_settings(100)


class FairnessContract:
    """What every fairness policy must do. ``make_policy`` returns a fresh policy."""

    documented_in = "FairnessPolicy in docs/reference/contract/fairness.md"

    def make_policy(self) -> FairnessPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    @_settings
    @given(_histories)
    def test_equal_histories_give_equal_ranks(self, history: list[Step]) -> None:
        assert self._ranks(history) == self._ranks(history)

    @_settings
    @given(_histories)
    def test_ranks_are_numbers(self, history: list[Step]) -> None:
        """Also of flows that never arrived, and after a charge was corrected."""
        assert all(math.isfinite(rank) for rank in self._ranks(history))

    @_settings
    @given(_histories)
    def test_a_charge_concerns_its_own_flow(self, history: list[Step]) -> None:
        """The queue asks for a flow's rank again only after a call for this flow."""
        policy = self.make_policy()
        flows = {policy.flow(principal) for principal in _PRINCIPALS}
        for flow in flows:
            policy.arrived(flow, 1.0)
        for step in history:
            before = {flow: policy.rank(flow) for flow in flows}
            self._do(policy, step)
            for flow in flows - {policy.flow(step[1])}:
                assert policy.rank(flow) == before[flow], "another flow's rank changed"

    def test_a_principal_is_always_of_the_same_flow(self) -> None:
        policy = self.make_policy()
        flows = [policy.flow(principal) for principal in _PRINCIPALS]
        for flow in flows:
            policy.arrived(flow, 1.0)
            policy.charge(flow, 1.0, 100, 10)
        assert [policy.flow(principal) for principal in _PRINCIPALS] == flows

    def test_nobody_starves(self) -> None:
        """One floods; each of the others has one request at a time, and each is served."""
        policy = self.make_policy()
        served = dict.fromkeys(_PRINCIPALS, 0)
        waiting = deque(_PRINCIPALS)
        for principal in _PRINCIPALS:
            policy.arrived(policy.flow(principal), 1.0)
        for _ in range(400):
            # Equal ranks: in the order of arrival.
            turn = min(waiting, key=lambda principal: policy.rank(policy.flow(principal)))
            waiting.remove(turn)
            waiting.append(turn)
            policy.admitted(policy.flow(turn))
            policy.charge(policy.flow(turn), 1.0, 100, 20)
            policy.arrived(policy.flow(turn), 1.0)
            served[turn] += 1
        assert min(served.values()) > 0, served

    def test_who_is_gone_is_forgotten_in_time(self) -> None:
        """A policy's memory does not grow with the number of principals that passed."""
        policy, sizes = self.make_policy(), []
        for number in range(30_000):
            flow = policy.flow(f"principal-{number}")
            policy.arrived(flow, 1.0)
            policy.admitted(flow)
            policy.charge(flow, 1.0, 1000, 100)
            if number % 1000 == 0:
                sizes.append(len(pickle.dumps(policy)))
        assert max(sizes[10:]) <= 1.5 * max(sizes[:10]) + 1024

    def _ranks(self, history: list[Step]) -> list[float]:
        policy = self.make_policy()
        ranks = []
        for step in history:
            self._do(policy, step)
            ranks += [policy.rank(policy.flow(principal)) for principal in _PRINCIPALS]
        return ranks

    def _do(self, policy: FairnessPolicy, step: Step) -> None:
        flow = policy.flow(step[1])
        if step[0] == "arrive":
            policy.arrived(flow, step[2] if len(step) == 3 else 1.0)
        elif step[0] == "admit":
            policy.admitted(flow)
        elif len(step) == 4:
            policy.charge(flow, 1.0, step[2], step[3])
