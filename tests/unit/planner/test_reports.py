"""What a planner observes of the reports of several front doors."""

from __future__ import annotations

import random

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.planner import Arrivals, SampleSums, length_bucket
from commutator.contract.tuning import ArmCounts
from commutator.contract.worker import Role
from commutator.demand import DoorReport, DoorReports


def counts(*prompts: int, gaps_squared_s2: float = 0.0) -> Arrivals:
    lengths: dict[int, int] = {}
    for tokens in prompts:
        lengths[length_bucket(tokens)] = lengths.get(length_bucket(tokens), 0) + 1
    return Arrivals(
        requests=len(prompts),
        prompt_tokens=sum(prompts),
        context_tokens=2 * sum(prompts),
        prompt_lengths=lengths,
        gaps_squared_s2=gaps_squared_s2,
    )


def report(door: str, number: int, *prompts: int, **more: object) -> DoorReport:
    return DoorReport(door=door, number=number, arrived={Role.BOTH: counts(*prompts)}, **more)  # type: ignore[arg-type]


def reports() -> DoorReports:
    return DoorReports(silence_s=5.0, gone_s=15.0)


def test_a_report_survives_its_frame() -> None:
    sent = report("a", 1, 100, 3000, loads={"w-0": (2, 300)}, waiting_tokens={Role.BOTH: 7})
    assert DoorReport.unpack(sent.pack()) == sent
    with pytest.raises(ValueError, match="door"):
        DoorReport.unpack({"number": 1})


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9000)), max_size=40))
def test_requests_at_two_front_doors_count_once(requests: list[tuple[bool, int]]) -> None:
    """As if one front door had had them all."""
    two, one = reports(), reports()
    for name in "ab":
        two.take(report(name, 1), 0.0)
    one.take(report("a", 1), 0.0)
    for name, mine in (("a", True), ("b", False)):
        two.take(report(name, 2, *[tokens for at, tokens in requests if at is mine]), 1.0)
    one.take(report("a", 2, *[tokens for _, tokens in requests]), 1.0)
    seen, expected = two.observe(1.0).arrivals, one.observe(1.0).arrivals
    assert seen is not None
    assert expected is not None
    assert seen[Role.BOTH] == expected[Role.BOTH]


def test_a_lost_report_is_made_up_for_and_a_late_one_ignored() -> None:
    doors = reports()
    doors.take(report("a", 1), 0.0)
    doors.take(report("a", 4, 10, 20, 30), 3.0)
    doors.take(report("a", 2, 10), 3.1)
    seen = doors.observe(4.0).arrivals
    assert seen is not None
    assert seen[Role.BOTH].requests == 3
    again = doors.observe(5.0).arrivals
    assert again is not None
    assert again[Role.BOTH].requests == 0


def test_a_restarted_front_door_counts_from_zero() -> None:
    doors = reports()
    doors.take(report("a-1", 1), 0.0)
    doors.take(report("a-1", 2, 10, 20), 1.0)
    doors.leave("a-1")
    doors.take(report("a-2", 1), 2.0)
    doors.take(report("a-2", 2, 30), 3.0)
    seen = doors.observe(3.0).arrivals
    assert seen is not None
    assert seen[Role.BOTH].requests == 3


def test_metrics_that_are_gone_are_none_and_not_zero() -> None:
    doors = reports()
    assert doors.observe(0.0).arrivals is None
    for name in "ab":
        doors.take(report(name, 1), 0.0)
    doors.take(report("a", 2, 10), 6.0)
    assert doors.observe(6.0).arrivals is None, "b has been silent for more than 5 s"
    doors.take(report("b", 2, 20, 30), 7.0)
    seen = doors.observe(7.0).arrivals
    assert seen is not None
    assert seen[Role.BOTH].requests == 3, "nothing is lost meanwhile"


def test_a_front_door_that_died_is_not_waited_for_for_ever() -> None:
    doors = reports()
    for name in "ab":
        doors.take(report(name, 1), 0.0)
    doors.take(report("b", 2, 10, loads={"w-0": (1, 10)}), 1.0)
    for number in range(2, 20):
        doors.take(report("a", number), float(number))
    seen = doors.observe(19.0)
    assert seen.arrivals is not None
    assert seen.arrivals[Role.BOTH].requests == 1
    assert seen.loads == {}


def test_what_workers_have_in_flight_is_the_sum() -> None:
    doors = reports()
    doors.take(report("a", 1, loads={"w-0": (2, 300), "w-1": (1, 0)}), 0.0)
    doors.take(report("b", 1, loads={"w-0": (1, 50)}, waiting_requests=2, oldest_wait_s=3.0), 0.0)
    seen = doors.observe(0.0)
    assert seen.loads == {"w-0": (3, 350), "w-1": (1, 0)}
    assert (doors.in_flight("w-0"), doors.in_flight("w-2")) == (3, 0)
    assert (seen.waiting_requests, seen.oldest_wait_s) == (2, 3.0)
    assert not doors.heard_since(0.0)
    assert doors.heard_since(-1.0)


def test_poisson_arrivals_at_two_front_doors_are_poisson() -> None:
    """Squared variation of the gaps near 1, though no door sees the gaps between the doors."""
    rng, window_s = random.Random(1), 1000.0
    squares = {}
    numbers = {}
    for name, rate in (("a", 3.0), ("b", 1.0)):
        now_s, total, number = 0.0, 0.0, 0
        while now_s < window_s:
            gap_s = rng.expovariate(rate)
            now_s, total, number = now_s + gap_s, total + gap_s**2, number + 1
        squares[name], numbers[name] = total, number
    doors = reports()
    for name in "ab":
        doors.take(report(name, 1), 0.0)
        mine = evolve(counts(*[10] * numbers[name]), gaps_squared_s2=squares[name])
        doors.take(evolve(report(name, 2), arrived={Role.BOTH: mine}), 1.0)
    seen = doors.observe(1.0).arrivals
    assert seen is not None
    merged = seen[Role.BOTH]
    mean_s = window_s / merged.requests
    assert merged.gaps_squared_s2 / merged.requests / mean_s**2 - 1 == pytest.approx(1.0, abs=0.1)


def test_what_front_doors_measured_is_added_up_and_counts_once() -> None:
    def measured(number: int, count: float) -> DoorReport:
        sums = SampleSums(count=count, terms=(count, 0.0, 0.0, 0.0), products=(count,) * 10)
        return report("a" if number < 10 else "b", number, measured={Role.BOTH: {5: sums}})

    doors = reports()
    doors.take(measured(1, 3.0), 0.0)
    doors.take(measured(10, 7.0), 0.0)
    doors.observe(0.5)
    doors.take(measured(2, 5.0), 1.0)
    doors.take(measured(11, 7.0), 1.0)
    assert doors.observe(1.5).measured[Role.BOTH][5].count == 2.0
    packed = measured(3, 6.0)
    assert DoorReport.unpack(packed.pack()) == packed
    doors.take(packed, 2.0)
    assert doors.observe(2.5).measured == {
        Role.BOTH: {5: SampleSums(count=1.0, terms=(1.0, 0.0, 0.0, 0.0), products=(1.0,) * 10)}
    }


def of_trial(door: str, number: int, trial: int, before: int, tried: int) -> DoorReport:
    counts = ArmCounts(ended=before), ArmCounts(ended=tried, missed=1)
    return report(door, number, trial=trial, arms=counts)


def test_the_requests_of_a_trial_at_all_front_doors_count_once() -> None:
    known = reports()
    known.take(of_trial("a", 1, 3, 10, 1), 0.0)
    known.take(of_trial("b", 1, 0, 0, 0), 0.0)
    known.observe(0.0)
    known.take(of_trial("a", 2, 3, 18, 2), 1.0)
    known.take(of_trial("b", 2, 3, 5, 1), 1.0)
    before, tried = known.observe(1.0).arms[3]
    assert (before.ended, tried.ended, tried.missed) == (13, 2, 1)
    known.take(of_trial("a", 3, 4, 2, 7), 2.0)
    known.take(of_trial("b", 3, 3, 6, 1), 2.0)
    arms = known.observe(2.0).arms
    assert (arms[4][1].ended, arms[3][0].ended) == (7, 1), "a stage is known by its number"
    assert known.observe(2.0).arms[4] == (ArmCounts(), ArmCounts())
    sent = of_trial("a", 4, 4, 3, 7)
    assert DoorReport.unpack(sent.pack()) == sent
