"""Values of clients' JSON: each is taken as it is meant, or refused with its path."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.errors import RequestError
from commutator.frontend import thinking_variables
from commutator_openai.values import (
    integer,
    not_served,
    number,
    object_at,
    optional,
    required,
    shown,
    without_nulls,
)

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-5, 5) | st.text(max_size=80),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@given(_JSON, st.sampled_from([int, str, bool, list, dict]))
def test_a_value_is_of_its_kind_or_named(value: Any, kind: type[Any]) -> None:
    is_right = type(value) is kind
    for path, name in (("", "a"), ("tools.0", "tools.0.a")):
        if is_right or value is None:
            assert optional({"a": value}, "a", kind, "what it is", path) is value
            continue
        with pytest.raises(RequestError, match=f"{name}: expected what it is, got ") as caught:
            optional({"a": value}, "a", kind, "what it is", path)
        assert (caught.value.param, caught.value.code) == (name, "invalid_value")
    if value is None:
        with pytest.raises(RequestError) as caught:
            required({"a": value}, "a", kind, "what it is")
        assert caught.value.code == "missing_required_parameter"
    elif is_right:
        assert required({"a": value}, "a", kind, "what it is") is value


@given(_JSON)
def test_numbers_are_within_their_bounds(value: Any) -> None:
    is_number = type(value) in (int, float)
    for read, fits in (
        (number, is_number and 0 <= value <= 2),
        (integer, type(value) is int and 0 <= value <= 2),
    ):
        if fits or value is None:
            assert read({"a": value}, "a", 0, 2) == value
        else:
            with pytest.raises(RequestError, match="a: expected "):
                read({"a": value}, "a", 0, 2)


@given(_JSON)
def test_what_is_shown_fits_into_a_line(value: Any) -> None:
    text = shown(value)
    assert 0 < len(text) <= 60
    assert "\n" not in text


def test_nulls_ask_for_nothing() -> None:
    assert without_nulls({"a": None, "b": 0, "c": False}) == {"b": 0, "c": False}
    with pytest.raises(RequestError, match="expected an object"):
        object_at([], "a")
    assert not_served("a", "x").code == "unsupported_parameter"


def test_what_templates_know_of_thinking() -> None:
    assert thinking_variables(None) == {}
    assert thinking_variables("low") == {"reasoning_effort": "low"}
    whether = {"enable_thinking": False, "thinking": False}
    assert thinking_variables("none") == {"reasoning_effort": "none", **whether}
    assert thinking_variables(None, thinks=False) == whether
