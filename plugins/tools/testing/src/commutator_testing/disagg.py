"""The conformance suite for disaggregation policies: subclass it, define a factory, run pytest."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from commutator import DisaggAnswer, DisaggPolicy, DisaggQuestion, MeasuredSpeeds, WorkerLoad
from commutator_testing.profile import suite_settings

_counts = st.integers(0, 100_000) | st.sampled_from([0, 1, 2**31, 10**15])

_loads = st.builds(
    WorkerLoad,
    active_requests=_counts,
    active_prefill_tokens=_counts,
    active_decode_blocks=_counts,
)

_rates = st.none() | st.floats(1e-3, 1e12)

_speeds = st.builds(
    MeasuredSpeeds,
    prefill_tokens_per_s=_rates,
    local_prefill_tokens_per_s=_rates,
    handover_bytes_per_s=_rates,
    handover_latency_s=st.none() | st.floats(0, 1e4),
)

_questions = st.builds(
    DisaggQuestion,
    prompt_tokens=st.integers(0, 1 << 20),
    cached_tokens=st.integers(0, 1 << 21),
    decode_load=_loads,
    prefill_loads=st.dictionaries(st.uuids().map(str), _loads, min_size=1, max_size=4),
    prefill_cached_tokens=st.integers(0, 1 << 21),
    queued_prefills=st.integers(0, 10_000),
    queue_age_s=st.floats(0, 1e4),
    token_bytes=st.integers(0, 1 << 30),
    speeds=_speeds,
)

_settings = suite_settings(50)


class DisaggContract:
    """What every disaggregation policy must do. ``make_policy`` returns a fresh policy."""

    documented_in = (
        "DisaggPolicy in docs/reference/contract/disagg.md and docs/explanation/disaggregation.md"
    )

    def make_policy(self) -> DisaggPolicy:
        raise NotImplementedError("return a fresh instance of the policy under test")

    @_settings
    @given(st.lists(_questions, min_size=1, max_size=5))
    def test_answers_and_explains(self, questions: Sequence[DisaggQuestion]) -> None:
        """Also with wrong counters, and before anything was measured."""
        policy = self.make_policy()
        for question in questions:
            before = copy.deepcopy(question)
            _check(policy.decide(question))
            assert question == before, "a policy must not change the question"

    @_settings
    @given(st.lists(_questions, min_size=1, max_size=5))
    def test_equal_history_gives_equal_answers(self, questions: Sequence[DisaggQuestion]) -> None:
        one, other = self.make_policy(), self.make_policy()
        for question in questions:
            assert one.decide(question) == other.decide(question)

    @_settings
    @given(_questions)
    def test_reasons_are_few(self, question: DisaggQuestion) -> None:
        """Reasons label metrics, so they contain no number of a request."""
        reason = self.make_policy().decide(question).reason
        assert not any(letter.isdigit() for letter in reason), reason


def _check(answer: DisaggAnswer) -> None:
    assert isinstance(answer.separate, bool)
    assert 0 < len(answer.reason) <= 40, "a reason is one or two words"
    for name, value in answer.terms.items():
        assert name, "a term has a name"
        assert not math.isnan(value), f"{name} is no number"
