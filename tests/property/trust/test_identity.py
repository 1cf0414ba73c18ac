"""Identities and their text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator.trust.identity import Identity, Kind, Right, identity_in

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)
IDENTITIES = st.builds(Identity, NAMES, st.sampled_from(Kind), NAMES)


@given(IDENTITIES)
def test_an_identity_is_what_its_text_says(identity: Identity) -> None:
    assert Identity.parse(str(identity)) == identity


@given(st.text(max_size=80) | st.builds("commutator://{}".format, st.text(max_size=60)))
def test_other_text_is_refused_or_read_exactly(text: str) -> None:
    try:
        identity = Identity.parse(text)
    except ValueError:
        return
    assert str(identity) == text


@given(IDENTITIES, IDENTITIES, st.lists(st.sampled_from(["https://a/b/c", "spiffe://x/host/y"])))
def test_a_certificate_names_one_process(one: Identity, two: Identity, others: list[str]) -> None:
    assert identity_in([*others, str(one)]) == one
    assert identity_in(others) is None
    assert identity_in([str(one), *others, str(two)]) is None


@pytest.mark.parametrize("name", ["", "a b", "a/b", "-a", "a" * 64, "ä", "a\n"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(ValueError, match="letters"):
        Identity("prod", Kind.HOST, name)


def test_each_kind_has_its_rights_only() -> None:
    assert Kind.HOST.rights == set(Right)
    may_generate = [kind for kind in Kind if Right.GENERATE in kind.rights]
    assert may_generate == [Kind.HOST, Kind.FRONTEND]
    may_operate = [kind for kind in Kind if Right.OPERATE in kind.rights]
    assert may_operate == [Kind.HOST, Kind.OPERATOR]
    may_announce = [kind for kind in Kind if Right.ANNOUNCE in kind.rights]
    assert may_announce == [Kind.HOST, Kind.WORKER]
