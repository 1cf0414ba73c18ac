"""In-flight accounting equals a recount from scratch, whatever happens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.routing import WorkerLoad
from commutator.routing import load as load_module
from commutator.routing.load import InFlightLoad, Ticket

steps = st.lists(
    st.tuples(st.sampled_from(["dispatch", "progress", "expect", "release"]), st.integers(0, 99)),
    max_size=60,
)


@given(steps)
def test_totals_equal_a_recount(plan: list[tuple[str, int]]) -> None:
    load, open_tickets = InFlightLoad(), list[Ticket]()
    expected: dict[int, int] = {}
    for action, number in plan:
        if action == "dispatch":
            ticket = load.dispatch(f"w{number % 3}", number, 16, number // 3)
            expected[id(ticket)] = number - number // 3
            open_tickets.append(ticket)
        elif open_tickets and action == "progress":
            load.progress(open_tickets[number % len(open_tickets)], number)
        elif open_tickets and action == "expect":
            ticket = open_tickets[number % len(open_tickets)]
            load.expect(ticket, number)
            expected[id(ticket)] = number
        elif open_tickets:
            load.release(open_tickets.pop(number % len(open_tickets)))
        check(load, open_tickets, expected)
    for ticket in open_tickets:
        load.release(ticket)
    check(load, [], {})


def check(load: InFlightLoad, open_tickets: list[Ticket], expected: dict[int, int]) -> None:
    for worker_id in ("w0", "w1", "w2"):
        mine = [ticket for ticket in open_tickets if ticket.worker_id == worker_id]
        assert load.of(worker_id) == WorkerLoad(
            active_requests=len(mine),
            active_prefill_tokens=sum(
                expected[id(ticket)] for ticket in mine if ticket.generated_tokens == 0
            ),
            active_decode_blocks=sum(
                -(-(t.prompt_tokens + t.generated_tokens) // 16) for t in mine
            ),
        )


@given(steps, steps)
def test_changes_are_remembered(
    before: list[tuple[str, int]], after: list[tuple[str, int]]
) -> None:
    load, tickets = InFlightLoad(), list[Ticket]()
    names = ["w0", "w1", "w2"]
    run(load, tickets, before)
    then, seen = load.changes, {name: load.of(name) for name in names}
    run(load, tickets, after)
    load.set_peers({"w1": WorkerLoad(active_requests=1), "w2": WorkerLoad()}, 1)
    found = load.changed_since(then)
    assert found is not None
    changed = list(found)
    assert len(changed) == len(set(changed))
    assert {name for name in names if load.of(name) != seen[name]} <= set(changed)
    assert not load.changed_since(load.changes)


def run(load: InFlightLoad, tickets: list[Ticket], plan: list[tuple[str, int]]) -> None:
    for action, number in plan:
        if action == "dispatch":
            tickets.append(load.dispatch(f"w{number % 2}", number, 16))
        elif tickets and action == "progress":
            load.progress(tickets[number % len(tickets)], number)
        elif tickets and action == "expect":
            load.expect(tickets[number % len(tickets)], number)
        elif tickets:
            load.release(tickets.pop(number % len(tickets)))


def test_changes_of_very_many_workers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_MOST_CHANGES", 2)
    load = InFlightLoad()
    for number in range(3):
        load.dispatch(f"w{number}", 1, 16)
    assert load.changed_since(0) is None
    then = load.changes
    load.dispatch("w1", 1, 16)
    assert load.changed_since(then) == ["w1"]
