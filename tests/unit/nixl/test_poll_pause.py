"""How often transfers under way are looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator_engine_kit.nixl.agent import POLL_S, poll_pause_s


@given(st.floats(0, 100))
def test_looking_delays_nothing_much_and_stays_cheap(waited_s: float) -> None:
    pause_s = poll_pause_s(waited_s)
    assert POLL_S <= pause_s <= 1e-3
    assert pause_s <= max(POLL_S, waited_s / 10)
    assert pause_s <= poll_pause_s(waited_s + 1)


def test_fast_transfers_are_looked_at_at_once_and_slow_ones_seldom() -> None:
    assert poll_pause_s(0.0) == POLL_S
    assert poll_pause_s(1.0) == 1e-3
