"""The queue under `weighted`: shares, no credit for idleness, a fair refusal, bounded memory."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.fairness import FairnessPolicy
from commutator.fairness import Fifo, Guarded, Weighted
from commutator.routing.queue import Place, RequestQueue

steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(-2, 2)),
        st.tuples(st.just("serve"), st.integers(0, 500)),
        st.tuples(st.just("leave"), st.integers(0, 9)),
    ),
    max_size=60,
)


def order(queue: RequestQueue, history: list[tuple[str, int]]) -> list[object]:
    """Everything that the queue answers to ``history``, of requests without a principal."""
    answers: list[object] = []
    waiting: list[Place] = []
    for what, number in history:
        if what == "arrive":
            place = queue.place(number)
            if queue.enter(place):
                waiting.append(place)
            elif (last := queue.enter_for_last(place)) is not None:
                waiting[waiting.index(last)] = place
                answers.append(last)
        elif what == "serve" and (first := queue.first()) is not None:
            queue.admitted(first, 0)
            queue.charge(first, number, number // 3)
            answers += [first, queue.leave(first)]
            waiting.remove(first)
        elif what == "leave" and waiting:
            answers.append(queue.leave(waiting.pop(number % len(waiting))))
        answers += [len(queue), queue.nearest(4)]
    return answers


@given(steps)
@settings(max_examples=200, deadline=None)
def test_without_principals_weighted_is_fifo(history: list[tuple[str, int]]) -> None:
    assert order(RequestQueue(5, Weighted()), history) == order(RequestQueue(5, Fifo()), history)


@given(
    costs=st.dictionaries(
        st.sampled_from("abcd"),
        st.tuples(st.integers(1, 1000), st.sampled_from([0.5, 1.0, 4.0])),
        min_size=2,
    ),
    turns=st.integers(1, 200),
)
@settings(max_examples=100, deadline=None)
def test_who_always_has_requests_waiting_gets_its_share(
    costs: dict[str, tuple[int, float]], turns: int
) -> None:
    """The difference of two counters is at most one request of each."""
    queue = RequestQueue(100, Weighted())
    got: Counter[str] = Counter()
    for name, (_, weight) in costs.items():
        queue.enter(queue.place(0, name, weight))
    for _ in range(turns):
        place = queue.first()
        assert place is not None
        assert place.flow is not None
        queue.enter(queue.place(0, place.flow, place.weight))
        queue.leave(place)
        queue.admitted(place, 0)
        queue.charge(place, costs[place.flow][0], 0)
        got[place.flow] += costs[place.flow][0]
    normal = {name: got[name] / weight for name, (_, weight) in costs.items()}
    slack = {name: cost / weight for name, (cost, weight) in costs.items()}
    for one in costs:
        for other in costs:
            assert abs(normal[one] - normal[other]) <= slack[one] + slack[other]


def _admit(queue: RequestQueue, costs: dict[str, int], got: Counter[str]) -> None:
    """Serve the first of the queue, behind which its principal has another one at once."""
    place = queue.first()
    assert place is not None
    assert place.flow is not None
    queue.enter(queue.place(0, place.flow, place.weight))
    queue.leave(place)
    queue.admitted(place, 0)
    queue.charge(place, costs[place.flow], 0)
    got[place.flow] += costs[place.flow]


@pytest.mark.security
@given(
    turns=st.lists(st.integers(0, 2), max_size=300),
    costs=st.fixed_dictionaries({"a": st.integers(1, 1000), "b": st.integers(1, 1000)}),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
)
@settings(max_examples=100, deadline=None)
def test_front_doors_that_do_not_share_counters_are_off_by_a_request_of_each(
    turns: list[int], costs: dict[str, int], weight: float
) -> None:
    """Of each principal at each front door, however unequally the doors admit; not more."""
    doors = [RequestQueue(100, Weighted()) for _ in range(3)]
    got: Counter[str] = Counter()
    for door in doors:
        door.enter(door.place(0, "a", 1.0))
        door.enter(door.place(0, "b", weight))
    for turn in turns:
        _admit(doors[turn], costs, got)
    slack = costs["a"] + costs["b"] / weight
    assert abs(got["a"] - got["b"] / weight) <= len(doors) * slack


@pytest.mark.security
@given(waits_at=st.integers(1, 3), turns=st.integers(1, 100), cost=st.integers(1, 1000))
@settings(max_examples=100, deadline=None)
def test_who_waits_at_some_front_doors_gets_its_share_of_what_these_admit(
    waits_at: int, turns: int, cost: int
) -> None:
    doors = [RequestQueue(100, Weighted()) for _ in range(3)]
    costs = {"flood": cost, "other": cost}
    got: Counter[str] = Counter()
    for number, door in enumerate(doors):
        door.enter(door.place(0, "flood"))
        if number < waits_at:
            door.enter(door.place(0, "other"))
    for _ in range(turns):
        for door in doors:
            _admit(door, costs, got)
    assert got["other"] >= waits_at * (turns / 2 - 1) * cost


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 2)), max_size=40))
@settings(max_examples=100, deadline=None)
def test_the_heap_finds_the_smallest_rank(arrivals: list[tuple[str, int]]) -> None:
    """With charges to waiting flows in between, in both directions."""
    policy = Weighted()
    queue = RequestQueue(100, policy)
    waiting: list[Place] = []
    for number, (name, priority) in enumerate(arrivals):
        place = queue.place(priority, name)
        queue.enter(place)
        waiting.append(place)
        queue.charge(waiting[number * 7 % len(waiting)], 100 - number * 5, 3)
        smallest = min(waiting, key=lambda p: (policy.rank(p.flow), p.priority, p.number))
        assert queue.first() == smallest
        assert queue.nearest(3)[0] == smallest
        if number % 3 == 2:
            assert queue.leave(smallest)
            waiting.remove(smallest)


def test_who_was_idle_gets_no_credit() -> None:
    queue = RequestQueue(100, Weighted())
    for _ in range(50):  # one alone, for a long time
        place = queue.place(0, "busy")
        queue.arrived(place)
        queue.admitted(place, 0)
        queue.charge(place, 1000, 0)
    for _ in range(20):
        queue.enter(queue.place(0, "idle"))
        queue.enter(queue.place(0, "busy"))
    served = []
    for _ in range(10):
        first = queue.first()
        assert first is not None
        served.append(first.flow)
        queue.leave(first)
        queue.admitted(first, 0)
        queue.charge(first, 1000, 0)
    assert Counter(served)["busy"] >= 4, "the idle one does not get 50 turns"


def test_who_comes_back_keeps_its_debt() -> None:
    policy = Weighted()
    queue = RequestQueue(100, policy)
    other = queue.place(0, "other")
    queue.enter(other)
    greedy = queue.place(0, "greedy")
    queue.enter(greedy)
    queue.charge(greedy, 100_000, 0)
    queue.leave(greedy)
    queue.enter(queue.place(0, "greedy"))
    assert policy.rank("greedy") == 100_000
    assert queue.first() == other


@given(st.integers(0, 3))
def test_forgotten_counters_cannot_be_turned_into_credit(seed: int) -> None:
    """Ten thousand come once; memory stays bounded, and nobody's counter becomes smaller."""
    policy = Weighted()
    policy.arrived("patient", 1.0)
    for number in range(10_000):
        name = f"p-{(number * (seed + 1)) % 10_007}"
        policy.arrived(name, 1.0)
        policy.admitted(name)
        before = policy.rank(name)
        policy.charge(name, 1.0, 100 + number % 50, 0)
        assert policy.rank(name) >= before
    assert policy.flows <= 4096
    before = policy.rank("newcomer")
    policy.arrived("p-1", 1.0)
    assert policy.rank("p-1") >= before, "it ranks no better than one who was served nothing"


@pytest.mark.security
def test_who_has_the_most_waiting_is_refused_first() -> None:
    queue = RequestQueue(8, Weighted())
    flood = [queue.place(0, "flood") for _ in range(8)]
    assert all(map(queue.enter, flood))
    assert queue.enter_for_last(queue.place(0, "flood")) is None
    for number in range(1, 4):
        place = queue.place(5, "other")  # its priorities are nobody else's business
        assert not queue.enter(place)
        assert queue.enter_for_last(place) == flood[-number]
    heavy = queue.place(0, "heavy", 4.0)
    assert queue.enter_for_last(heavy) == flood[-4]
    urgent = queue.place(-9, "other")
    assert queue.enter_for_last(urgent) is not None
    assert len(queue) == 8


class _Broken(FairnessPolicy):
    def flow(self, principal: str | None) -> str | None:
        raise RuntimeError("no flow")

    def arrived(self, flow: str | None, weight: float) -> None:
        raise RuntimeError("no arrival")

    def admitted(self, flow: str | None) -> None:
        raise RuntimeError("no admission")

    def charge(
        self, flow: str | None, weight: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        raise RuntimeError("no charge")

    def rank(self, flow: str | None) -> float:
        return float("nan")


def test_a_policy_that_fails_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    queue = RequestQueue(5, Guarded(_Broken()))
    places = [queue.place(0, name) for name in "abc"]
    for place in places:
        assert queue.enter(place)
    for place in places:
        assert queue.first() == place
        queue.admitted(place, 0)
        queue.charge(place, 5, 5)
        queue.leave(place)
    assert "fairness policy _Broken failed in flow" in caplog.text
