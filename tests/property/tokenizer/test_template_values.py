"""Templates find in mappings what jinja's own sandbox finds there."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Undefined
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from commutator.contract.conversation import Described
from commutator.tokenizer.text_model import _Sandbox

_names = st.sampled_from(
    [*("role", "content", "items", "get", "update", "as_json", "keys", "__dict__", "__class__"), ""]
)
_mappings = st.dictionaries(_names, st.integers() | st.text(max_size=2), max_size=4)


def found(environment: ImmutableSandboxedEnvironment, value: Any, name: str) -> object:
    one = environment.getattr(value, name)
    if not isinstance(one, Undefined):
        return type(one) if callable(one) else one
    with pytest.raises(Exception, match=r"undefined|has no attribute|unsafe") as raised:
        one()
    return type(one), type(raised.value) is SecurityError, str(raised.value)


@given(_mappings.flatmap(lambda one: st.sampled_from([one, Described(one)])), _names)
def test_names_of_mappings_mean_what_they_mean_in_jinja(value: Any, name: str) -> None:
    assert found(_Sandbox(), value, name) == found(ImmutableSandboxedEnvironment(), value, name)
