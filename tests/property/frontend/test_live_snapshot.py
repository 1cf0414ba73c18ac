"""Rates, percentiles and shares of the live view."""

from __future__ import annotations

from typing import Any

from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.routing import Decision
from commutator.contract.worker import EdgeStatistics, KvStatistics, TierState
from commutator_console.snapshot import (
    DEVICE,
    DoorPart,
    Event,
    RateWindow,
    RequestRow,
    cache_hits,
    changes,
    decision_row,
    flows,
    handovers,
    kv_totals,
    latency,
    latest,
    minus,
    plus,
    principals,
    requests,
)

COUNTS = st.recursive(
    st.integers(0, 1000),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=8,
)
"""Trees of one shape are made by adding one to itself: what counts keeps its shape."""
BOUNDS = (0.1, 0.2, 0.5)


@given(COUNTS, st.integers(0, 3))
def test_what_was_added_is_what_is_the_difference(tree: Any, times: int) -> None:
    total = tree
    for _ in range(times):
        total = plus(total, tree)
    left = total
    for _ in range(times):
        left = minus(left, tree)
    assert left == tree


def test_parts_that_only_one_tree_has_count_as_they_are() -> None:
    assert plus({"a": 1}, {"b": {"c": 2}}) == {"a": 1, "b": {"c": 2}}
    assert minus({"a": 1, "b": 5}, {"b": 2, "gone": 9}) == {"a": 1, "b": 3}
    assert plus([1, 2], [3, 4]) == [4, 6]


def test_counters_that_fell_are_no_negative_rate() -> None:
    assert minus({"a": 1}, {"a": 7}) == {"a": 0}


def test_a_window_keeps_its_length_and_forgets_what_is_older() -> None:
    window = RateWindow(10)
    assert (window.elapsed_s, window.total()) == (0, {})
    for second in range(100):
        window.add(second, {"door": ("1", {"n": 3 * second})})
    assert (window.elapsed_s, window.total()) == (10, {"n": 30})
    window.clear()
    assert window.elapsed_s == 0


def test_a_restarted_door_counts_from_where_it_was_first_seen() -> None:
    window = RateWindow(10)
    window.add(0, {"a": ("1", {"n": 100}), "b": ("1", {"n": 7})})
    window.add(1, {"a": ("1", {"n": 110}), "b": ("2", {"n": 1})})
    window.add(2, {"a": ("1", {"n": 120}), "b": ("2", {"n": 5})})
    assert window.by_source() == {"a": {"n": 20}, "b": {"n": 4}}
    assert window.total() == {"n": 24}
    window.add(3, {"a": ("1", {"n": 120})})  # b does not answer
    assert window.total() == {"n": 20}


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4))
def test_percentiles_are_in_order_and_within_their_buckets(counts: list[int]) -> None:
    found = latency({"counts": counts, "sum_s": 1.0}, BOUNDS)
    assert found["count"] == sum(counts)
    if not found["count"]:
        assert found["p50_s"] is found["p95_s"] is found["mean_s"] is None
        return
    assert 0 <= found["p50_s"] <= found["p95_s"] <= BOUNDS[-1]


def test_a_percentile_is_interpolated_within_its_bucket() -> None:
    assert latency({"counts": [0, 4, 0, 0], "sum_s": 0.6}, BOUNDS)["p50_s"] == 0.15000000000000002
    assert latency({"counts": [0, 0, 0, 9], "sum_s": 9.0}, BOUNDS)["p50_s"] == 0.5
    assert latency({}, BOUNDS)["count"] == 0


def part(door: str = "frontend-0", **more: Any) -> DoorPart:
    given: dict[str, Any] = {
        "door": door, "instance": "1", "draining": False, "running": 2, "queued": 1,
        "waiting": 0, "in_flight": {}, "totals": {}, "recent": [], "events": [],
    }  # fmt: skip
    return DoorPart(**given | more)


def test_requests_of_all_doors_are_added() -> None:
    window = RateWindow(10)
    assert requests(window.total(), window.elapsed_s, [part()])["per_s"] is None
    for second, count in ((0, 0), (2, 8)):
        ttft = {"counts": [count] + [0] * 13, "sum_s": 0.001 * count}
        tree = {"requests": {"ok": count, "failed": count}, "output_tokens": 10 * count,
                "ttft": ttft}  # fmt: skip
        window.add(second, dict.fromkeys(("a", "b"), ("1", tree)))
    found = requests(window.total(), window.elapsed_s, [part("a"), part("b")])
    assert (found["running"], found["queued"]) == (4, 2)
    assert (found["per_s"], found["failed_per_s"], found["output_tokens_per_s"]) == (16, 8, 80)
    assert (found["ttft"]["count"], found["ttft"]["mean_s"]) == (16, 0.001)
    assert found["itl"]["count"] == 0


TIER = TierState(
    name="dram", medium="CPU", up=True, capacity=9, published=3, staged=0, leaving=0, waiting=0,
    loading=0, retained=0, pins_refused=0, loads={"loaded": 4, "missing": 9}, not_loaded={},
    removed={}, latency_s=None, block_s=None,
)  # fmt: skip
KV = KvStatistics(
    tiers=(TIER, evolve(TIER, name="nvme", loads={})),
    edges=(EdgeStatistics(source=DEVICE, target="dram", stored=6, not_admitted={}, failed={}),),
    blocks=3, held_on_device=0, loads_running=0, stores_running=0,
)  # fmt: skip


def test_blocks_that_tiers_loaded_are_their_part_of_the_hits() -> None:
    moved = {name: tree for name, (_, tree) in kv_totals({"w": KV}).items()}
    assert moved == {"w": {"dram": {DEVICE: 4}, "nvme": {DEVICE: 0}, DEVICE: {"dram": 6}}}
    counted = {"prompt_tokens": 1000, "cached_tokens": 500}
    found = cache_hits(counted, moved, {"w": 16})
    assert found["hit_rate"] == 0.5
    by_tier = {one["tier"]: one["hit_rate"] for one in found["by_tier"]}
    assert by_tier == {DEVICE: 0.436, "dram": 0.064, "nvme": 0}
    # What was loaded for requests that run still is no more than what was found in caches.
    early = cache_hits({"prompt_tokens": 100, "cached_tokens": 32}, moved, {"w": 16})
    assert {one["tier"]: one["hit_rate"] for one in early["by_tier"]}["dram"] == 0.32
    assert cache_hits({}, {}, {})["hit_rate"] is None
    rates = {(one["source"], one["target"]): one["blocks_per_s"] for one in flows(moved, 2)}
    assert rates == {("dram", DEVICE): 2, ("nvme", DEVICE): 0, (DEVICE, "dram"): 3}


def test_the_busiest_come_first_and_the_others_are_counted() -> None:
    counted = {"principals": {f"p{n}": {"requests": n, "prompt_tokens": 10} for n in range(9)}}
    shown, left_out = principals(counted, 2, 3)
    assert ([one["name"] for one in shown], left_out) == (["p8", "p7", "p6"], 6)
    assert shown[0]["requests_per_s"] == 4
    pairs = {"p": {f"d{n}": {"count": n, "bytes": 10 * n, "failed": 0} for n in range(9)}}
    assert [one["decode"] for one in handovers({"handovers": pairs}, 1, 2)] == ["d8", "d7"]


def test_the_latest_of_all_doors_newest_first() -> None:
    rows = [
        RequestRow(
            request_id=str(n), time_unix_s=n, model="m", principal=None, prompt_tokens=1,
            worker_id="w", policy="p", reason="r",
        )
        for n in range(6)
    ]  # fmt: skip
    up = Event(time_unix_s=5.01, kind="worker up", text="w")
    doors = [
        part("a", recent=rows[::2], events=[up]),
        part("b", recent=rows[1::2], events=[evolve(up, time_unix_s=5.2)]),
    ]
    recent, events = latest(doors, 4)
    assert [row.request_id for row in recent] == ["5", "4", "3", "2"]
    assert len(events) == 1  # both doors saw the same


NAMES = st.sampled_from([f"w-{number}" for number in range(20)])
TERMS = st.dictionaries(st.sampled_from(["cost", "queue"]), st.floats(-9, 9), max_size=2)


@given(st.dictionaries(NAMES, TERMS), NAMES, st.integers(0, 5), st.integers(1, 12))
def test_a_decision_keeps_the_chosen_and_the_best_others(
    scores: dict[str, dict[str, float]], chosen: str, not_scored: int, most: int
) -> None:
    decision = Decision(
        worker_id=chosen, policy="p", reason="r", scores=scores, not_scored=not_scored
    )
    row = decision_row("r", decision, most)
    assert len(row.scores) == min(most, len(scores))
    assert row.left_out == len(scores) - len(row.scores) + not_scored
    assert all(scores[name] == terms for name, terms in row.scores.items())
    if chosen in scores:
        assert next(iter(row.scores)) == chosen
    firsts = [next(iter(terms.values()), 0.0) for name, terms in row.scores.items()
              if name != chosen]  # fmt: skip
    assert firsts == sorted(firsts)


SEEN = st.dictionaries(
    NAMES,
    st.tuples(st.sampled_from(["ready", "draining"]), st.sampled_from(["prefill", "decode"])),
)


@given(SEEN, SEEN)
def test_every_drain_and_change_of_role_is_told_once(
    before: dict[str, tuple[str, str]], now: dict[str, tuple[str, str]]
) -> None:
    found = list(changes(before, now))
    known = before.keys() & now.keys()
    drained = {one for one in known if (before[one][0], now[one][0]) == ("ready", "draining")}
    moved = {one for one in known if before[one][1] != now[one][1]}
    named = [(kind, text.split()[0]) for kind, text in found]
    assert sorted(named) == sorted(
        [("drain", one) for one in drained] + [("role", one) for one in moved]
    )


def test_the_same_event_of_two_doors_is_one_and_a_later_one_another() -> None:
    event = Event(time_unix_s=5.4, kind="drain", text="w")
    later = evolve(event, time_unix_s=9.0)
    doors = [part("a", events=[event, later]), part("b", events=[evolve(event, time_unix_s=5.6)])]
    assert latest(doors, 9)[1] == [later, event]
