"""``cache_control``: what the engine is asked to keep, and what its client is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, FrontDoor, answer, front_door
from tests.support.principals import gate_of, key_of

from commutator.contract.principal import PrincipalConfig
from commutator.contract.request import KvRetention
from commutator.errors import RequestError
from commutator_anthropic.protocol import AnthropicConfig
from commutator_anthropic.reading import read_request, without_lifetimes

MARK: Mapping[str, Any] = {"cache_control": {"type": "ephemeral"}}
SYSTEM = "Answer in the manner of a lighthouse keeper. " * 20
USER = {"role": "user", "content": "Who are you?"}
NEXT = [{"role": "assistant", "content": "A keeper."}, {"role": "user", "content": "Of what?"}]


def read(**fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 8, "messages": [USER], **fields}
    return read_request(body, server_tools="leave_out").generate


def text(said: str, **mark: Any) -> dict[str, Any]:
    return {"type": "text", "text": said, **mark}


def test_marks_are_those_of_their_messages() -> None:
    tool = {"name": "f", "input_schema": {"type": "object"}, **MARK}
    hour = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [text("found", **MARK)]}
    five_minutes = KvRetention(priority=1, ttl_s=300.0)
    asked = read(
        tools=[tool],
        system="Be brief.",
        messages=[
            {"role": "user", "content": [text("a", **hour), text("b")]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]},
            {"role": "user", "content": [result, text("c")]},
        ],
    )
    assert [(one.role, one.retention) for one in asked.conversation.messages] == [
        ("system", five_minutes),
        ("user", KvRetention(priority=1, ttl_s=3600.0)),
        ("assistant", None),
        ("tool", five_minutes),
        ("user", None),
    ]
    assert asked.retention is None
    whole = read(**MARK)
    assert whole.retention == five_minutes
    bare = without_lifetimes(asked).conversation
    assert bare is not None
    assert [one.retention for one in bare.messages] == [
        *(KvRetention(), KvRetention(), None, KvRetention(), None)
    ]
    assert without_lifetimes(whole).retention == KvRetention()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"cache_control": {"type": "persistent"}}, "cache_control"),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": {"type": "ephemeral", "ttl": []}}, "cache_control.ttl"),
        ({"system": [text("x", cache_control=1)]}, "system.0.cache_control"),
        (
            {"messages": [{"role": "user", "content": [text("x", cache_control={})]}]},
            "messages.0.content.0.cache_control",
        ),
    ],
)
def test_wrong_ones_are_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**fields)
    assert caught.value.param == param


PROTOCOLS = (AnthropicConfig(kind="anthropic"),)
BLOCK = 16


async def usage(door: FrontDoor, **fields: Any) -> tuple[int, int, int]:
    """Tokens of the prompt: new ones, those that are cached now, those that were."""
    body = {"model": MODEL, "max_tokens": 8, "messages": [USER], **fields}
    status, answered = await door.post("/v1/messages", body)
    assert status == 200, answered
    counted = answered["usage"]
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    new, created, found = (counted[name] for name in names)
    return new, created, found


def full_blocks(tokens: int) -> int:
    return tokens // BLOCK * BLOCK


async def test_what_was_computed_up_to_the_last_mark_was_created() -> None:
    dispatcher = FakeDispatcher(answer("Hello there!", cached_tokens=2 * BLOCK))
    system = [text(SYSTEM, **MARK)]
    async with front_door(dispatcher, protocols=PROTOCOLS) as door:
        plain = await usage(door, system=SYSTEM, messages=[USER, *NEXT])
        early = await usage(door, system=system, messages=[USER, *NEXT])
        late = {"role": "user", "content": [text("Of what?", **MARK)]}
        last = await usage(door, system=system, messages=[USER, NEXT[0], late])
        whole = await usage(door, system=SYSTEM, messages=[USER, *NEXT], **MARK)
        little = await usage(door, messages=[{"role": "user", "content": [text("Hi", **MARK)]}])
    *others, (kept,), _, _, _ = [request.retention for request in dispatcher.requests]
    assert others == [()]
    prompt = len(dispatcher.requests[0].token_ids)
    assert plain == (prompt - 2 * BLOCK, 0, 2 * BLOCK)
    assert kept.tokens is not None
    beginning = TEXT.decode(
        dispatcher.requests[1].token_ids[: kept.tokens], skip_special_tokens=False
    )
    assert SYSTEM.strip() in beginning
    assert "Who" not in beginning
    assert early == (
        prompt - full_blocks(kept.tokens),
        full_blocks(kept.tokens) - 2 * BLOCK,
        2 * BLOCK,
    )
    assert last == whole == (prompt % BLOCK, full_blocks(prompt) - 2 * BLOCK, 2 * BLOCK)
    assert little[1] == 0


async def test_nothing_is_created_where_nothing_is_cached() -> None:
    async with front_door(FakeDispatcher(cached_blocks=None), protocols=PROTOCOLS) as door:
        new, created, found = await usage(door, system=SYSTEM, **MARK)
    assert (created, found) == (0, 0)
    assert new > 0


async def test_a_client_that_may_not_keep_blocks_is_served_and_told_the_same() -> None:
    may = PrincipalConfig(permissions=("pin",)).principal("may")
    may_not = PrincipalConfig(permissions=()).principal("not")
    dispatcher, told = FakeDispatcher(), []
    async with front_door(dispatcher, protocols=PROTOCOLS, gate=gate_of(may, may_not)) as door:
        for principal in (may, may_not):
            door.session.headers.update(key_of(principal.name))
            told.append(await usage(door, system=[text(SYSTEM, **MARK)], **MARK))
    assert told[0] == told[1]
    assert told[0][1] > 0
    kept, not_kept = (request.retention for request in dispatcher.requests)
    assert {(one.priority, one.ttl_s) for one in kept} == {(1, 300.0)}
    assert {(one.priority, one.ttl_s) for one in not_kept} == {(0, None)}
