"""How soon a worse version is given up, and how rarely an equal one is, by simulated requests."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from attrs import frozen

from commutator_rollout.judge import Arm, Judging, Seen, Verdict, begin, evidence, judge
from commutator_traffic.config import CanaryConfig

SHARE = 0.05
SEEDS = 100
ANSWER_S = 4
"""Requests end that long after they came."""


@frozen(kw_only=True)
class Version:
    fails: float = 0.0
    itl_factor: float = 1.0
    ttft_factor: float = 1.0


def seconds(rate: float, old: Version, new: Version, seed: int) -> Iterator[Seen]:
    """What ends in each second: times vary from request to request as they do in practice."""
    rng = random.Random(seed)
    second = 0
    while True:
        second += 1
        arms: list[tuple[list[int], list[float], list[float]]]
        arms = [([0, 0], [], []), ([0, 0], [], [])]
        waited_s = rng.expovariate(rate)
        while second > ANSWER_S and waited_s < 1:
            waited_s += rng.expovariate(rate)
            is_new = rng.random() < SHARE
            version, (counts, ttfts, itls) = (old, new)[is_new], arms[is_new]
            counts[0] += 1
            if rng.random() < version.fails:
                counts[1] += 1
                continue
            ttfts.append(rng.lognormvariate(-1.5, 0.8) * version.ttft_factor)
            itls.append(rng.lognormvariate(-4, 0.3) * version.itl_factor)
        of_old, of_new = (
            Arm(ended=counts[0], failed=counts[1], ttft_s=ttfts, itl_s=itls)
            for counts, ttfts, itls in arms
        )
        yield Seen(serves=True, old=of_old, new=of_new)


def decided(
    config: CanaryConfig, rate: float, old: Version, new: Version, seed: int
) -> tuple[int, Verdict]:
    """After how many seconds of serving, and what."""
    state, _ = judge(config, begin(config, 0.0), Seen(serves=True), 0.0)
    for now_s, seen in enumerate(seconds(rate, old, new, seed), 1):
        state, verdict = judge(config, state, seen, float(now_s))
        if verdict is not None:
            return now_s, verdict
    raise AssertionError


@pytest.mark.parametrize(("rate", "within_s"), [(20, 300), (400, 30)])
@pytest.mark.parametrize(
    ("new", "why"),
    [
        (Version(itl_factor=2.0), "tokens take over 25% longer"),
        (Version(fails=0.03), "more of its requests fail"),
    ],
    ids=["doubled inter-token latency", "3 % errors"],
)
def test_a_worse_version_is_given_up_in_time(
    rate: float, within_s: float, new: Version, why: str
) -> None:
    config = CanaryConfig(model="v2")
    took = []
    for seed in range(SEEDS):
        after_s, verdict = decided(config, rate, Version(), new, seed)
        if not verdict.good and verdict.why.startswith(why):
            took.append(after_s)
    took.sort()
    print(f"{why}, {rate}/s: {len(took)} of {SEEDS}, the 95th after {took[94]} s")
    assert took[94] <= within_s


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "config"),
    [(20, CanaryConfig(model="v2")), (400, CanaryConfig(model="v2", judge_for_s=60))],
    ids=["20/s", "400/s"],
)
@pytest.mark.parametrize("fails", [0.0, 0.02])
def test_an_equal_version_is_promoted(rate: float, config: CanaryConfig, fails: float) -> None:
    same = Version(fails=fails)
    ended = [decided(config, rate, same, same, seed)[1] for seed in range(SEEDS)]
    alarms = [one.why for one in ended if not one.good]
    print(f"equal, {rate}/s, {fails:.0%} errors: {len(alarms)} false alarms")
    assert len(alarms) <= 1, alarms


def test_first_tokens_that_take_twice_as_long_are_noticed() -> None:
    config, new = CanaryConfig(model="v2"), Version(ttft_factor=2.0)
    ended = [decided(config, 20, Version(), new, seed) for seed in range(20)]
    assert all("first tokens take over 50% longer" in verdict.why for _, verdict in ended)


def serving(config: CanaryConfig) -> Judging:
    state, verdict = judge(config, begin(config, 0.0), Seen(serves=True), 5.0)
    assert verdict is None
    return state


def test_who_does_not_become_ready_is_given_up_at_the_deadline() -> None:
    config = CanaryConfig(model="v2", ready_within_s=60)
    state = begin(config, 0.0)
    ignored = Arm(ended=50, failed=50)
    state, verdict = judge(config, state, Seen(serves=False, new=ignored), 60.0)
    assert (verdict, state.new.ended) == (None, 0)
    _, verdict = judge(config, state, Seen(serves=False), 60.5)
    assert verdict == Verdict(False, "it was not ready within 60 s")


def test_a_crash_ends_it_at_once() -> None:
    config = CanaryConfig(model="v2")
    _, verdict = judge(config, serving(config), Seen(serves=True, crash="w-0 failed"), 5.2)
    assert verdict == Verdict(False, "w-0 failed")


def test_too_few_requests_are_waited_for_and_then_it_is_given_up() -> None:
    config = CanaryConfig(model="v2", judge_for_s=10, min_requests=30, decide_within_s=100)
    state = serving(config)
    some = Seen(serves=True, old=Arm(ended=100), new=Arm(ended=10))
    state, verdict = judge(config, state, some, 20.0)
    assert verdict is None
    _, late = judge(config, state, Seen(serves=True), 105.0)
    assert late is not None
    assert not late.good
    assert "too few requests" in late.why
    _, good = judge(config, state, Seen(serves=True, new=Arm(ended=20)), 21.0)
    assert good is not None
    assert good.good


def test_tolerances_say_what_does_not_matter() -> None:
    new = Version(itl_factor=1.5)
    strict = decided(CanaryConfig(model="v2"), 100, Version(), new, 1)[1]
    lenient = decided(CanaryConfig(model="v2", itl_tolerance=0.6), 100, Version(), new, 1)[1]
    assert (strict.good, lenient.good) == (False, True)


def test_the_evidence_tells_how_near_it_is() -> None:
    config = CanaryConfig(model="v2")
    state = serving(config)
    assert evidence(state) == {"errors": 0, "ttft": 0, "itl": 0}
    state, _ = judge(
        config,
        state,
        Seen(serves=True, old=Arm(ended=40), new=Arm(ended=2, failed=1)),
        6.0,
    )
    assert 0 < evidence(state)["errors"] < 1
