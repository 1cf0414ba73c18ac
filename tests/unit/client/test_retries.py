"""When the client sends a request again. No connection is made."""

from __future__ import annotations

import math
from email.utils import formatdate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator_client.retries import Retries, retry_after_s

NOW_S = 1_700_000_000.0
RULES = Retries(most=3, delay_s=1.0, longest_wait_s=60.0)


def wait(attempt: int = 1, status: int | None = None, chance: float = 0.0, **headers: str) -> float:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    found = RULES.wait_s(attempt, status, named, now_unix_s=NOW_S, chance=chance)
    return math.nan if found is None else found


def test_delays_double_where_the_server_names_none() -> None:
    assert [wait(attempt) for attempt in (1, 2, 3)] == [1.0, 2.0, 4.0]
    assert math.isnan(wait(4))


def test_the_server_says_when() -> None:
    assert wait(3, 429, retry_after="7") == 7.0
    assert wait(1, 503, retry_after="7", retry_after_ms="250") == 0.25
    assert wait(1, 503, retry_after=formatdate(NOW_S + 5, usegmt=True)) == pytest.approx(5.0)
    assert wait(1, 503, retry_after=formatdate(NOW_S - 5, usegmt=True)) == 0.0
    assert wait(1, 429, retry_after="soon") == 1.0


def test_a_long_wait_is_for_the_caller_to_decide() -> None:
    assert wait(1, 429, retry_after="60") == 60.0
    assert math.isnan(wait(1, 429, retry_after="61"))


@pytest.mark.parametrize("status", [200, 400, 401, 403, 404, 409, 413, 422, 500, 504])
def test_what_was_decided_is_not_asked_again(status: int) -> None:
    assert math.isnan(wait(1, status))
    assert wait(1, status, x_should_retry="true") == 1.0


@pytest.mark.parametrize("status", [408, 429, 502, 503])
def test_what_may_go_later_is(status: int) -> None:
    assert wait(1, status) == 1.0
    assert math.isnan(wait(1, status, x_should_retry="false"))


HEADERS = st.dictionaries(
    st.sampled_from(["retry-after", "retry-after-ms", "x-should-retry"]),
    st.one_of(st.text(max_size=30), st.floats().map(str), st.integers().map(str)),
)


@given(
    st.integers(1, 10_000),
    st.none() | st.integers(100, 599),
    HEADERS,
    st.floats(0, 1, exclude_max=True),
)
def test_waits_are_finite_and_few(
    attempt: int, status: int | None, headers: dict[str, str], chance: float
) -> None:
    found = Retries(20, 1.0, 60.0).wait_s(attempt, status, headers, now_unix_s=NOW_S, chance=chance)
    if found is not None:
        assert attempt <= 20
        assert 0 <= found <= 75
        asked_s = retry_after_s(headers, NOW_S)
        assert asked_s is None or found >= asked_s, "no sooner than the server wants"
