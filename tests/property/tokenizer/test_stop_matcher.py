"""The stop-string matcher agrees with a naive search and holds back no more than it must."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from commutator.tokenizer.text_model import StopMatcher

# Few letters make overlaps and near misses common.
texts = st.text("ab\n", max_size=20)
stops = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(pieces=st.lists(texts, max_size=8), stops=stops, include=st.booleans())
@example(pieces=["a", "b", "ab"], stops=["abb", "bab"], include=False)
def test_agrees_with_naive_search(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(stops, include_stop=include)
    out = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    assert (out, matcher.matched) == naive("".join(pieces), stops, include=include)


@given(text=texts, stops=stops)
def test_holds_back_only_what_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    out = "".join(matcher.push(character) for character in text)
    if matcher.matched is None:
        held = text[len(out) :]
        assert text.startswith(out)
        assert held == "" or any(stop.startswith(held) for stop in stops)


@given(text=texts, stops=stops)
def test_emits_nothing_after_a_match(text: str, stops: list[str]) -> None:
    matcher = StopMatcher([*stops, "a"])
    matcher.push("a")
    assert matcher.matched is not None
    assert matcher.push(text) + matcher.flush() == ""
