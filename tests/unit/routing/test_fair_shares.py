"""What a flood by one principal costs another, in virtual time: routing, queue and sim engines."""

from __future__ import annotations

import pytest
from tests.support.shared_fleet import Client, Fleet, run_fleet, shares

LIGHT = Client("light", prompt_tokens=100, answer_tokens=60, per_s=10)
FLOOD = Client("flood", prompt_tokens=100, answer_tokens=60, concurrent=300)
# Two at a time: a third would slow the engines' batches themselves, whatever the queue does.
MANY = Fleet(workers=16, max_active_requests=2, for_s=15.0)
FEW = Fleet(workers=4, max_active_requests=4, for_s=30.0)


@pytest.mark.security
def test_a_flood_leaves_the_other_s_p99_within_1_2_of_its_alone() -> None:
    alone = run_fleet(MANY, [LIGHT]).p99_s("light")
    assert run_fleet(MANY, [LIGHT, FLOOD]).p99_s("light") <= 1.2 * alone
    first_come = Fleet(workers=16, max_active_requests=2, for_s=15.0, fairness="fifo")
    assert run_fleet(first_come, [LIGHT, FLOOD]).p99_s("light") > 4 * alone


def test_many_keys_of_one_principal_and_a_better_priority_gain_nothing() -> None:
    """Requests count for the principal, and its priorities order its own requests alone."""
    flood = Client("flood", 100, 60, concurrent=300, priority=-1000)
    alone = run_fleet(MANY, [LIGHT]).p99_s("light")
    assert run_fleet(MANY, [LIGHT, flood]).p99_s("light") <= 1.2 * alone


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_weights_give_proportional_shares_of_tokens(weight: float) -> None:
    """Within 5 %, though one sends long prompts and wants short answers."""
    ada = Client("ada", prompt_tokens=100, answer_tokens=60, concurrent=100, weight=weight)
    bea = Client("bea", prompt_tokens=300, answer_tokens=30, concurrent=50)
    got = shares(run_fleet(FEW, [ada, bea]).tokens)
    assert got["ada"] / got["bea"] == pytest.approx(weight, rel=0.05)


def test_a_tenth_of_the_clients_gets_half_of_the_tokens() -> None:
    many = Client("many", prompt_tokens=100, answer_tokens=60, concurrent=200)
    few = Client("few", prompt_tokens=100, answer_tokens=60, concurrent=20)
    got = shares(run_fleet(FEW, [many, few]).tokens)
    assert got["few"] == pytest.approx(0.5, rel=0.05)


def test_a_full_queue_refuses_the_flood_and_not_the_other() -> None:
    fleet = Fleet(workers=4, max_active_requests=2, for_s=10.0, max_queued_requests=16)
    light = Client("light", prompt_tokens=100, answer_tokens=60, per_s=3)
    served = run_fleet(fleet, [light, FLOOD])
    assert served.refused["light"] == 0
    assert served.refused["flood"] > 100


def test_nobody_asked_who_they_are_is_first_come_first_served() -> None:
    clients = [
        Client(None, 100, 60, concurrent=20),
        Client(None, 50, 80, per_s=10, priority=-1),
        Client(None, 200, 20, per_s=5, priority=3),
    ]
    fifo = Fleet(workers=2, max_active_requests=2, for_s=10.0, fairness="fifo")
    weighted = Fleet(workers=2, max_active_requests=2, for_s=10.0)
    assert run_fleet(fifo, clients) == run_fleet(weighted, clients)
