"""What a request asks of an engine: right values are kept as they are, wrong ones are refused."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commutator import AdapterIdentity, Constraint, GenerateRequest, MediaIdentity, SamplingParams
from commutator.contract.request import MAX_SESSION_CHARS

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
JSON_TEXTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
).map(json.dumps)
WHITESPACE = st.none() | st.sampled_from(["", " ?", r"\s*"])
AFTER = st.lists(st.integers(0, 2**32 - 1), max_size=3).map(tuple)
ADAPTERS = st.builds(AdapterIdentity, name=st.text(), digest=DIGESTS)
CONSTRAINTS = st.one_of(
    st.builds(Constraint, kind=st.just("json_object"), after=AFTER, whitespace=WHITESPACE),
    st.builds(
        Constraint,
        kind=st.sampled_from(["json_schema", "structural_tag"]),
        value=JSON_TEXTS,
        after=AFTER,
        whitespace=WHITESPACE,
    ),
    st.builds(
        Constraint,
        kind=st.sampled_from(["regex", "grammar"]),
        value=st.text(min_size=1),
        after=AFTER,
    ),
    st.builds(
        Constraint,
        kind=st.just("choice"),
        value=st.lists(st.text(min_size=1), min_size=1, max_size=4).map(tuple),
        after=AFTER,
    ),
)
MEDIA = st.builds(
    MediaIdentity,
    kind=st.sampled_from(["image", "audio", "video"]),
    digest=DIGESTS,
    start=st.integers(0, 1000),
    tokens=st.integers(1, 1000),
)


@given(
    st.none() | CONSTRAINTS,
    st.none() | ADAPTERS,
    st.lists(MEDIA, max_size=2).map(tuple),
    st.none() | st.text(min_size=1, max_size=MAX_SESSION_CHARS),
)
def test_what_is_asked_survives_a_trip(
    constraint: Constraint | None,
    adapter: AdapterIdentity | None,
    media: tuple[MediaIdentity, ...],
    session: str | None,
) -> None:
    request = GenerateRequest(
        request_id="r",
        token_ids=[1],
        sampling=SamplingParams(),
        constraint=constraint,
        adapter=adapter,
        media=media,
        session=session,
    )
    packed = msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(packed, type=GenerateRequest) == request
    assert request.adapter_digest == (None if adapter is None else adapter.digest)


@given(st.text(), st.text(), DIGESTS, DIGESTS)
def test_an_adapter_is_its_content(one: str, other: str, first: str, second: str) -> None:
    mine = AdapterIdentity(name=one, digest=first)
    assert mine == AdapterIdentity(name=other, digest=first)
    assert (mine == AdapterIdentity(name=one, digest=second)) == (first == second)


@given(st.text())
def test_what_is_no_digest_is_no_identity(text: str) -> None:
    right = len(text) == 64 and set(text) <= set("0123456789abcdef")
    for wrong in (text, text.upper(), "sha256:" + "a" * 57):
        if not right:
            with pytest.raises(ValueError, match="64 lower-case hex digits"):
                AdapterIdentity(name="sql", digest=wrong)


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "json_object", "value": "{}"},
        {"kind": "json_schema"},
        {"kind": "json_schema", "value": "{"},
        {"kind": "json_schema", "value": "[" * 100_000},
        {"kind": "structural_tag", "value": "nothing"},
        {"kind": "regex"},
        {"kind": "regex", "value": ("a",)},
        {"kind": "regex", "value": "a", "whitespace": ""},
        {"kind": "grammar", "value": ""},
        {"kind": "choice", "value": "a"},
        {"kind": "choice", "value": ()},
        {"kind": "choice", "value": ("a", "")},
    ],
)
def test_a_constraint_that_says_nothing_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=f"constraint {fields['kind']}: "):
        Constraint(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("session", ["", "a" * (MAX_SESSION_CHARS + 1)])
def test_a_session_is_bounded(session: str) -> None:
    with pytest.raises(ValueError, match="1 to 256 characters"):
        GenerateRequest(request_id="r", token_ids=[1], sampling=SamplingParams(), session=session)


@pytest.mark.parametrize(("start", "tokens"), [(-1, 1), (0, 0)])
def test_media_have_a_place(start: int, tokens: int) -> None:
    with pytest.raises(ValueError, match="no place"):
        MediaIdentity(kind="image", digest="0" * 64, start=start, tokens=tokens)
