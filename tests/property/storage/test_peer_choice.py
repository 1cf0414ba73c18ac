"""Which peers a look-up asks: few, the likely ones, and everybody in the end."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator_peer.choice import PeerChoice

names = st.text("abcdefgh:1", min_size=1, max_size=4)
peers = st.lists(names, max_size=40, unique=True)
chains = st.binary(min_size=1, max_size=1)


@given(st.integers(1, 12), st.lists(st.tuples(peers, chains, st.integers(0, 3)), max_size=20))
def test_never_more_than_asked_for_and_never_a_stranger(
    most: int, look_ups: list[tuple[list[str], bytes, int]]
) -> None:
    choice = PeerChoice(most)
    for known, chain, lenders in look_ups:
        chosen = choice.choose(known, chain)
        assert len(chosen) == len(set(chosen)) == min(most, len(known))
        assert set(chosen) <= set(known)
        for lender in chosen[:lenders]:
            choice.lent(lender, chain)


@given(st.integers(1, 12), peers, st.lists(names, max_size=20))
def test_everybody_is_asked_in_turn_whoever_lends(
    most: int, known: list[str], lenders: list[str]
) -> None:
    choice = PeerChoice(most)
    for lender in lenders:
        choice.lent(lender, b"chain")
    asked: set[str] = set()
    in_turn = max(1, most - most // 2)
    for _ in range(-(-len(known) // in_turn)):
        asked.update(choice.choose(known, b"chain"))
    assert asked == set(known)


@given(st.integers(2, 12), st.integers(13, 60), st.data())
def test_who_lent_such_a_prompt_is_asked_again_and_first(
    most: int, count: int, data: st.DataObject
) -> None:
    known = [f"peer-{number}" for number in range(count)]
    choice = PeerChoice(most)
    lender = data.draw(st.sampled_from(known))
    choice.lent(lender, b"chain")
    for other in known[: most // 2]:
        choice.lent(other, b"another chain")
    for _ in range(5):
        assert choice.choose(known, b"chain")[0] == lender


def test_what_is_remembered_is_bounded() -> None:
    choice = PeerChoice(8)
    for number in range(10_000):
        choice.lent(f"peer-{number}", number.to_bytes(4, "big"))
    assert len(choice._chains) <= 4096
    assert len(choice._lenders) <= 8
