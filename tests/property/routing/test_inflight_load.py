"""In-flight accounting equals a recount from scratch, whatever happens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.routing import WorkerLoad
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
