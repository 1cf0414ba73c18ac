"""``cache_control``: on the request and on messages, from JSON to what the engine is asked."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.front_door import TEXT, FakeDispatcher, front_door

from commutator.contract.request import KvRetention

LONG = "Answer in the manner of a lighthouse keeper. " * 4


async def test_of_a_whole_request() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        await door.chat(cache_control={"type": "ephemeral"})
        await door.complete(prompt="Hi", cache_control={"type": "persistent", "ttl": "1h"})
        await door.complete(prompt="Hi", cache_control={"type": "ephemeral", "priority": -2})
        await door.chat()
    assert [request.retention for request in dispatcher.requests] == [
        (KvRetention(priority=1, ttl_s=300.0),),
        (KvRetention(priority=1, ttl_s=3600.0, pinned=True),),
        (KvRetention(priority=-2, ttl_s=300.0),),
        (),
    ]


async def test_of_a_message_it_holds_for_the_prompt_up_to_there() -> None:
    dispatcher = FakeDispatcher()
    mark = {"cache_control": {"type": "ephemeral", "ttl": "30s"}}
    part = {"type": "text", "text": "Who are you?", "cache_control": {"type": "persistent"}}
    async with front_door(dispatcher) as door:
        await door.chat(
            messages=[
                {"role": "system", "content": LONG, **mark},
                {"role": "user", "content": [part]},
                {"role": "assistant", "content": "A keeper."},
                {"role": "user", "content": "Of what?"},
            ],
            cache_control={"type": "ephemeral"},
        )
    (request,) = dispatcher.requests
    whole, first, second = request.retention
    assert whole.tokens is None
    assert (first.ttl_s, first.pinned) == (30.0, False)
    assert (second.ttl_s, second.pinned) == (300.0, True)
    for kept, ends in ((first, LONG.strip()), (second, "Who are you?")):
        assert kept.tokens is not None
        beginning = TEXT.decode(request.token_ids[: kept.tokens], skip_special_tokens=False)
        assert ends in beginning
        assert "A keeper." not in beginning
    assert "Who are you?" not in TEXT.decode(request.token_ids[: first.tokens])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"type": "forever"}, "cache_control.type"),
        ({}, "cache_control.type"),
        ({"type": "ephemeral", "ttl": "5 minutes"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": "31d"}, "cache_control.ttl"),
        ({"type": "ephemeral", "ttl": 300}, "cache_control.ttl"),
        ({"type": "ephemeral", "priority": 11}, "cache_control.priority"),
    ],
)
async def test_what_is_wrong_is_refused(given: dict[str, Any], said: str) -> None:
    async with front_door(FakeDispatcher()) as door:
        status, body = await door.chat(cache_control=given)
    assert status == 400
    assert body["error"]["param"] == said


@pytest.mark.security
async def test_marks_beyond_four_are_refused_before_anything_is_rendered_for_them() -> None:
    part = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        status, _ = await door.chat(messages=[{"role": "user", "content": [part] * 4}])
        assert status == 200
        status, body = await door.chat(messages=[{"role": "user", "content": [part] * 2000}])
        assert (status, body["error"]["param"]) == (400, "messages")
        assert "at most 4" in body["error"]["message"]
    assert len(dispatcher.requests) == 1
