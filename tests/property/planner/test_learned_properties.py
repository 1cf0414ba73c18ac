"""Learning is bounded, forgets in order, and no order of events breaks a meter."""

from __future__ import annotations

import math

from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.planned_fleet import SIM

from commutator_slo.learned import LearnedSpeed, StepMeter, bucket_of
from commutator_slo.performance import Sample, fit, sums_of

samples = st.builds(
    Sample,
    seconds=st.floats(1e-3, 100),
    steps=st.integers(7, 500),
    step_requests=st.floats(7, 5000),
    prompt_tokens=st.floats(0, 1e5),
) | st.builds(
    Sample,
    seconds=st.floats(1e-3, 100),
    prompt_tokens=st.floats(1, 1e5),
    first_tokens=st.just(1),
)
some = settings(deadline=None, max_examples=60)


@some
@given(st.lists(samples, min_size=1, max_size=80))
def test_no_speed_is_negative_and_none_is_infinite(found: list[Sample]) -> None:
    speed = LearnedSpeed(told=SIM)
    for number, one in enumerate(found):
        speed = speed.learn({bucket_of(one): sums_of(one)}, 61.0 * number, 61.0)
    used = speed.performance
    assert used.step_s >= 0
    assert used.step_request_s >= 0
    assert math.isfinite(used.prefill_tokens_per_s)
    assert used.prefill_tokens_per_s > 0
    assert all(sums.count <= 64.001 for sums in speed.buckets.values())
    assert speed.residual is None or speed.residual >= 0


@some
@given(
    st.floats(0.25, 4),
    st.floats(0.25, 4),
    st.floats(0.25, 4),
    st.lists(st.tuples(st.integers(1, 64), st.integers(0, 2000)), min_size=12, max_size=60),
)
def test_exact_samples_are_explained_exactly(
    step: float, request: float, token: float, work: list[tuple[int, int]]
) -> None:
    """Whatever the speed was thought to be."""
    true = evolve(
        SIM,
        step_s=SIM.step_s * step,
        step_request_s=SIM.step_request_s * request,
        prefill_tokens_per_s=SIM.prefill_tokens_per_s * token,
    )
    made = []
    for running, prompt in work:
        seconds = 100 * (true.step_s + running * true.step_request_s)
        made.append(
            Sample(
                seconds=seconds + prompt / true.prefill_tokens_per_s,
                steps=100,
                step_requests=100 * running,
                prompt_tokens=prompt,
            )
        )
    assert fit(made, SIM).residual < 1e-3


events = st.lists(
    st.tuples(
        st.sampled_from(["began", "answered", "ended", "lost"]),
        st.integers(0, 5),
        st.sampled_from("ab"),
        st.floats(0, 2),
        st.integers(0, 40),
    ),
    max_size=80,
)


@some
@given(events)
def test_no_order_of_events_breaks_a_meter(
    happened: list[tuple[str, int, str, float, int]],
) -> None:
    meter, now_s = StepMeter(), 0.0
    for what, key, worker, passed_s, tokens in happened:
        now_s += passed_s
        if what == "began":
            meter.began(key, worker, now_s, prompt_tokens=tokens, ahead_tokens=tokens)
        elif what == "answered":
            meter.answered(key, worker, now_s)
        elif what == "ended":
            meter.ended(key, worker, tokens, now_s)
        else:
            meter.lost(key, now_s)
    for sums in meter.take().values():
        assert all(math.isfinite(term) and term >= 0 for term in sums.terms)
    for key in range(6):
        meter.lost(key, now_s)
    assert not meter._workers, "a worker without requests is not remembered"
    assert not meter._requests
