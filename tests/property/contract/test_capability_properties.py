"""What engines declare: values of options are judged by it, and only who can is a candidate."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from commutator import (
    AdapterIdentity,
    Constraint,
    EngineInfo,
    GenerateRequest,
    MediaIdentity,
    Operation,
    OptionType,
    RequestOption,
    SamplingParams,
)
from commutator.errors import RequestError
from commutator.routing.placement import able
from commutator.routing.workers import LiveWorker

KINDS = ("regex", "choice")
MEDIA = ("image", "audio")
OPTIONS = {
    "steps": RequestOption(type=OptionType.INTEGER, minimum=1, maximum=9),
    "words": RequestOption(type=OptionType.STRINGS, most=3),
}
INFO = EngineInfo(
    kind="fake", version="1", model="m", max_model_len=128, block_size=16, kv_capacity_blocks=64
)
INFOS = st.builds(
    lambda **given: evolve(INFO, **given),
    kind=st.sampled_from(["one", "two"]),
    operations=st.sampled_from([(Operation.GENERATE,), (Operation.GENERATE, "embed"), ("embed",)]),
    constraints=st.sets(st.sampled_from(KINDS)).map(tuple),
    adapters=st.booleans(),
    media=st.sets(st.sampled_from(MEDIA)).map(tuple),
    request_options=st.sets(st.sampled_from(sorted(OPTIONS))).map(
        lambda names: {name: OPTIONS[name] for name in names}
    ),
)
REQUESTS = st.builds(
    GenerateRequest,
    request_id=st.just("r"),
    token_ids=st.just([1, 2, 3]),
    sampling=st.just(SamplingParams()),
    constraint=st.sampled_from(
        [
            None,
            Constraint(kind="regex", value="a+"),
            Constraint(kind="choice", value=("a",)),
            Constraint(kind="json_object"),
        ]
    ),
    adapter=st.sampled_from([None, AdapterIdentity(name="sql", digest="a" * 64)]),
    media=st.sampled_from(
        [(), *((MediaIdentity(kind=k, digest="b" * 64, start=0, tokens=1),) for k in MEDIA)]
    ),
    options=st.sampled_from(
        [{}, {"steps": 3}, {"steps": 10}, {"words": ["a"]}, {"steps": 1, "words": []}, {"no": 1}]
    ),
)


def can(info: EngineInfo, request: GenerateRequest) -> bool:
    """Said another way than the code does."""
    kinds = {one.kind for one in request.media}
    return (
        "generate" in info.operations
        and (request.constraint is None or request.constraint.kind in info.constraints)
        and (request.adapter is None or info.adapters)
        and kinds <= set(info.media)
        and all(
            name in info.request_options and OPTIONS[name].problem(value) is None
            for name, value in request.options.items()
        )
    )


@given(st.lists(INFOS, max_size=5), REQUESTS)
def test_only_who_can_is_a_candidate(infos: list[EngineInfo], request: GenerateRequest) -> None:
    workers = [
        cast(LiveWorker, SimpleNamespace(record=SimpleNamespace(info=info))) for info in infos
    ]
    right = [can(info, request) for info in infos]
    if infos and not any(right):
        with pytest.raises(
            RequestError, match='no worker of model "m" can serve this: '
        ) as refused:
            able("m", workers, request)
        assert all(info.kind in str(refused.value) or "got" in str(refused.value) for info in infos)
        return
    usable = able("m", workers, request)
    assert [usable(worker) for worker in workers] == right


@given(INFOS, REQUESTS)
def test_every_generating_engine_can_serve_what_is_plain(
    info: EngineInfo, request: GenerateRequest
) -> None:
    generates = Operation.GENERATE in info.operations
    if request.is_plain:
        assert (info.unmet(request) is None) == generates
    bare = evolve(info, constraints=(), adapters=False, media=(), request_options={})
    assert (bare.unmet(request) is None) == (generates and request.is_plain)


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers() | st.text(max_size=3) | st.booleans(), max_size=5),
    st.dictionaries(st.text(max_size=1), st.none(), max_size=1),
)
NUMBERS = st.none() | st.integers(-5, 5)


def is_number(value: Any, kinds: Any, option: RequestOption) -> bool:
    right: bool = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    if not right:
        return False
    low: bool = option.minimum is None or value >= option.minimum
    return low and bool(option.maximum is None or value <= option.maximum)


@given(VALUES, NUMBERS, NUMBERS, st.integers(0, 4))
def test_a_value_is_legal_if_it_is_what_was_declared(
    value: Any, minimum: int | None, maximum: int | None, most: int
) -> None:
    def option(kind: str) -> RequestOption:
        return RequestOption(type=kind, minimum=minimum, maximum=maximum, most=most)

    limits = option(OptionType.NUMBER)
    items = value if isinstance(value, list) else None
    expected = {
        OptionType.BOOLEAN: isinstance(value, bool),
        OptionType.INTEGER: is_number(value, int, limits),
        OptionType.NUMBER: is_number(value, (int, float), limits),
        OptionType.STRING: isinstance(value, str) and len(value) <= most,
        OptionType.INTEGERS: items is not None
        and len(items) <= most
        and all(is_number(item, int, limits) for item in items),
        OptionType.STRINGS: items is not None
        and len(items) <= most
        and all(isinstance(item, str) and len(item) <= most for item in items),
        "of tomorrow": False,
    }
    found = {kind: option(kind).problem(value) is None for kind in expected}
    assert found == expected


def test_choices_are_named() -> None:
    option = RequestOption(type=OptionType.STRING, choices=("low", "high"))
    assert option.problem("low") is None
    assert option.problem("middle") == "expected one of low, high"
