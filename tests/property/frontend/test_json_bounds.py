"""The bounds of JSON are exact, and know strings from structure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.errors import RequestError
from commutator.frontend.request import bodies as bounds
from commutator.frontend.request.bodies import check_json

TREES = st.recursive(
    st.none() | st.integers() | st.text(st.sampled_from('[]{},:"\\a')),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.text(st.sampled_from('[]{},:"\\a')), inner, max_size=4
    ),
    max_leaves=30,
)  # fmt: skip


def measured(value: Any) -> tuple[int, int]:
    """How many objects and lists there are, and how deep."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [measured(one) for one in (value.values() if isinstance(value, dict) else value)]
    return 1 + sum(one[0] for one in inner), 1 + max((one[1] for one in inner), default=0)


@pytest.mark.security
@given(value=TREES, most=st.integers(0, 12), deepest=st.integers(0, 5))
def test_exactly_what_is_over_the_bounds_is_refused(value: Any, most: int, deepest: int) -> None:
    containers, depth = measured(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MAX_CONTAINERS", most)
        patch.setattr(bounds, "MAX_DEPTH", deepest)
        # Few marks are let pass without being counted; here they are always counted.
        patch.setattr(bounds, "MAX_VALUES", 10**6)
        text = json.dumps(value).encode()
        opened = text.count(b"[") + text.count(b"{")
        expected = opened > deepest and (containers > most or depth > deepest)
        if expected:
            with pytest.raises(RequestError, match="too complex"):
                check_json(text)
        else:
            check_json(text)


def most_keys(value: Any) -> int:
    """Of one object in ``value``."""
    if not isinstance(value, dict | list):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    own = len(value) if isinstance(value, dict) else 0
    return max([own, *map(most_keys, inner)])


@pytest.mark.security
@given(value=TREES, most=st.integers(0, 5))
def test_exactly_the_objects_of_too_many_keys_are_refused(value: Any, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bounds, "MAX_KEYS", most)
        text = json.dumps(value).encode()
        if most_keys(value) > most:
            with pytest.raises(RequestError, match=f"at most {most} keys in one object"):
                check_json(text)
        else:
            check_json(text)


@given(text=st.binary() | st.text(st.sampled_from('[]{},:"\\ a1')).map(str.encode))
def test_what_is_no_json_is_left_to_the_decoder(text: bytes) -> None:
    check_json(text)


@pytest.mark.security
@pytest.mark.parametrize(
    "text",
    [
        b"[" * 65,
        b"[" + b"[]," * 60_000,
        b"[" + b"0," * (1 << 21),
        b"[" + b'"",' * (1 << 22),
        json.dumps({"metadata": {str(key): key for key in range(400_000)}}).encode(),
    ],
    ids=["depth", "lists", "numbers", "strings", "keys"],
)
def test_amplification_is_refused(text: bytes) -> None:
    with pytest.raises(RequestError):
        check_json(text)


def test_a_text_full_of_marks_passes() -> None:
    check_json(json.dumps({"prompt": '[],{}"\\' * 300_000}).encode())
