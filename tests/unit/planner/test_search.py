"""The search for a placement: it finds the best, goes on with the better half, and says why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from tests.support.planned_fleet import SIM

from commutator_replay.search import Layout, Load, Search, expected_rate, load_of
from commutator_replay.search_cli import layouts
from commutator_replay.trace import TraceRequest

CHATS = Load(prompt_tokens=1155, context_tokens=1155, output_tokens=211)


def trace(requests: int = 1600) -> list[TraceRequest]:
    """Two requests a second."""
    return [
        TraceRequest(500.0 * n, 1155, 211, (3 * n, 3 * n + 1, 3 * n + 2)) for n in range(requests)
    ]


def rate_of(part: Sequence[TraceRequest]) -> float:
    return len(part) * 1000 / (part[-1].timestamp - part[0].timestamp)


def search(goodput: Any, **options: Any) -> tuple[Search, Counter[tuple[Layout, int]]]:
    """``goodput``: of a layout, below which all requests are in time and above which none is."""
    runs: Counter[tuple[Layout, int]] = Counter()

    def run(layout: Layout, part: Sequence[TraceRequest]) -> float:
        runs[layout, len(part)] += 1
        return float(rate_of(part) <= goodput(layout))

    values: dict[str, Any] = {"trace": trace(), "layouts": layouts(8, ["conditional"])} | options
    made = Search(performance=SIM, itl_s=0.05, attainment=0.95, run=run, **values)
    return made, runs


def formula(layout: Layout) -> float:
    return expected_rate(layout, CHATS, SIM, 0.05)


def test_formulas_begin_with_the_worked_examples() -> None:
    """An aggregated worker of 4.03/s, and the best split of eight with 24.2/s."""
    assert formula(Layout(1)) == pytest.approx(4.033, abs=0.01)
    rates = [formula(Layout(8 - p, p, "conditional")) for p in range(1, 8)]
    expected = [4.85, 9.70, 14.55, 19.39, 24.24, 23.82, 11.91]
    assert rates == pytest.approx(expected, abs=0.05)


def test_the_mean_request_is_counted_with_what_an_infinite_cache_would_hold() -> None:
    shared = [evolve(one, hash_ids=(1, 2, one.hash_ids[2])) for one in trace(4)]
    load = load_of(shared)
    assert load.context_tokens == 1155
    assert load.prompt_tokens == pytest.approx((1155 + 3 * (1155 - 1024)) / 4)


def test_the_best_is_found_also_where_formulas_are_wrong() -> None:
    def truth(layout: Layout) -> float:
        return formula(layout) * (
            0.4 if not layout.prefill else 1.5 if layout.prefill == 3 else 1.0
        )

    made, _ = search(truth)
    result = made.result()
    expected = max(layouts(8, ["conditional"]), key=truth)
    assert result.best.layout == expected
    assert result.best.goodput[1] == pytest.approx(truth(expected), rel=0.1)


def test_the_better_half_goes_on_and_each_one_left_out_says_why() -> None:
    made, runs = search(formula)
    result = made.result()
    tried = {size: {layout for layout, n in runs if n == size} for _, size in runs}
    assert len(tried[200]) > len(tried[400]) >= 2
    assert {one.layout for one in result.looks} == set(layouts(8, ["conditional"]))
    assert result.looks[0] == result.best
    assert result.best.why == ""
    for one in result.looks[1:]:
        assert "of the best by" in one.why
    assert any("by the formulas" in one.why for one in result.looks)
    assert any("by 1/8 of the trace" in one.why for one in result.looks)


def test_all_see_the_same_requests_at_the_same_times() -> None:
    seen: dict[float, set[tuple[int, ...]]] = {}

    def run(_: Layout, part: Sequence[TraceRequest]) -> float:
        seen.setdefault(round(rate_of(part), 6), set()).add(tuple(one.line for one in part[:5]))
        return 1.0

    Search(
        trace=[evolve(one, line=n) for n, one in enumerate(trace(300))],
        layouts=[Layout(2), Layout(1, 1, "conditional")],
        performance=SIM,
        itl_s=0.05,
        attainment=0.95,
        run=run,
    ).result()
    assert all(len(parts) == 1 for parts in seen.values())


def test_a_knob_is_taken_only_if_it_is_better() -> None:
    def truth(layout: Layout) -> float:
        knobs = dict(layout.knobs)
        return 20.0 * {None: 1.0, 1: 0.5, 2: 1.3, 3: 1.25}[knobs.get("router.weight")]

    made, _ = search(
        truth, knobs={"router.weight": [1, 2, 3], "disaggregation.length": [5]}, layouts=[Layout(8)]
    )
    result = made.result()
    assert result.best.layout == Layout(8, knobs=(("router.weight", 2),))
    assert result.best.goodput[1] > 22
    assert result.notes[0] == "router.weight=1: not better"
    assert "taken" in result.notes[1]
    assert len(result.notes) == 3, "disaggregation has no part in it"


def test_the_front_shows_what_fewer_workers_attain() -> None:
    made, _ = search(lambda layout: 0.45 * layout.workers, layouts=[Layout(8)])
    front = made.result().front
    assert [(layout.workers, attained) for layout, attained in front] == [
        (4, 0.0),
        (5, 1.0),
        (6, 1.0),
        (7, 1.0),
        (8, 1.0),
    ]


def test_targets_that_nothing_meets_are_said() -> None:
    made, _ = search(lambda _: 0.0, knobs={"router.weight": [1]})
    assert made.result().notes == [
        "no placement meets the targets at any rate tried: they are too tight"
    ]
