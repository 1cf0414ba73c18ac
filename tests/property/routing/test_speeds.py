"""Speeds that are measured from single requests: exact where they are exact, never absurd."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.routing.disagg.prefill_pool import Line, Rate, SpeedMeter
from commutator.routing.disagg.request import on_handover_failure

SAMPLES = st.lists(
    st.tuples(st.integers(0, 10**10), st.floats(0, 1e3, allow_subnormal=False)), max_size=50
)
"""Tokens or bytes, and seconds."""


@given(SAMPLES)
def test_nothing_measured_is_absurd(samples: list[tuple[int, float]]) -> None:
    meter = SpeedMeter()
    for amount, seconds in samples:
        meter.prefill.add(amount, seconds)
        meter.local_prefill.add(amount, seconds)
        meter.handover.add(amount, seconds)
        speeds = meter.speeds()
        for rate in (
            speeds.prefill_tokens_per_s,
            speeds.local_prefill_tokens_per_s,
            speeds.handover_bytes_per_s,
        ):
            assert rate is None or rate > 0
        latency_s = speeds.handover_latency_s
        assert latency_s is None or 0 <= latency_s < math.inf


@given(st.floats(1, 1e6), st.lists(st.floats(1, 1e5), min_size=1, max_size=30))
def test_a_constant_speed_is_found(per_s: float, amounts: list[float]) -> None:
    rate = Rate()
    for amount in amounts:
        rate.add(amount, amount / per_s)
    assert rate.per_s == pytest.approx(per_s, rel=1e-6)


@given(
    st.floats(1e-3, 1.0),
    st.floats(1e6, 1e10),
    st.lists(st.integers(1, 1000), max_size=20),
)
def test_latency_and_bandwidth_are_distinguished(
    latency_s: float, per_s: float, sizes: list[int]
) -> None:
    line = Line()
    for size in (1, 1000, *sizes):
        line.add(size * per_s / 100, latency_s + size / 100)
    found_s, found_per_s = line.fit()
    assert found_s == pytest.approx(latency_s, rel=0.05, abs=1e-2)
    assert found_per_s == pytest.approx(per_s, rel=0.05)


def test_what_the_samples_do_not_tell_is_none() -> None:
    line = Line()
    assert line.fit() == (None, None)
    line.add(100.0, 2.0)
    line.add(100.0, 2.0)
    latency_s, per_s = line.fit()
    assert latency_s is None
    assert per_s == pytest.approx(50.0)
    falling = Line()
    falling.add(100.0, 2.0)
    falling.add(200.0, 1.0)
    assert falling.fit()[1] is None


def test_old_samples_fade() -> None:
    rate = Rate()
    for _ in range(100):
        rate.add(10.0, 1.0)
    for _ in range(100):
        rate.add(1000.0, 1.0)
    assert rate.per_s is not None
    assert rate.per_s > 900


def test_ways_after_a_failure() -> None:
    assert on_handover_failure("fail", 1, overloaded=False) == "fail"
    assert on_handover_failure("prefill_locally", 1, overloaded=False) == "prefill_locally"
    assert on_handover_failure("another_worker", 1, overloaded=False) == "another_worker"
    assert on_handover_failure("another_worker", 2, overloaded=False) == "prefill_locally"
    for on_failure in ("fail", "prefill_locally", "another_worker"):
        assert on_handover_failure(on_failure, 0, overloaded=True) == "another_worker"
