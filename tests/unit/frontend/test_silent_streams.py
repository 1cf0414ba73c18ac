"""Streams that wait for long are never silent for long, so that no proxy cuts them."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.support.front_door import MODEL, FakeDispatcher, front_door

from commutator.errors import EngineError
from commutator_http.silence import Silences

ASKED = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}


class Stream:
    def __init__(self) -> None:
        self.spoke_s = 0.0
        self.pings = 0

    async def ping(self) -> None:
        self.pings += 1


async def test_who_was_silent_for_as_long_is_found_once_each_time() -> None:
    now = 0.0
    silences = Silences(10.0, clock=lambda: now)
    quiet, talking = Stream(), Stream()
    silences.watch(quiet)
    silences.watch(talking)
    now = 9.0
    talking.spoke_s = now
    assert silences.look() == []
    now = 10.0
    assert silences.look() == [quiet]
    assert silences.look() == []
    now = 20.0
    assert silences.look() == [quiet, talking]
    silences.forget(quiet)
    silences.forget(quiet)
    now = 40.0
    assert silences.look() == [talking]
    silences.forget(talking)


async def _lines(door: Any, body: dict[str, Any]) -> list[str]:
    async with door.session.post(door.url + "/v1/chat/completions", json=body) as response:
        assert response.status == 200
        text: str = await response.text()
        return text.split("\n\n")


async def test_a_stream_that_waits_is_pinged_before_and_between_its_pieces() -> None:
    async with front_door(FakeDispatcher(delay_s=0.5), ping_s=0.1) as door:
        sent = await _lines(door, {**ASKED, "stream": True})
    pieces = [one for one in sent if one.startswith("data: ")]
    assert sent[0] == ": ping"
    assert ": ping" in sent[sent.index(pieces[0]) :]
    assert pieces[-1] == "data: [DONE]"
    async with front_door(FakeDispatcher(delay_s=0.0), ping_s=60.0) as door:
        undisturbed = await _lines(door, {**ASKED, "stream": True})
    assert len(pieces) == len([one for one in undisturbed if one])


async def test_a_failure_after_a_ping_ends_the_stream() -> None:
    class Fails(FakeDispatcher):
        async def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.sleep(0.4)
            raise EngineError("it broke")

    async with front_door(Fails(), ping_s=0.1) as door:
        sent = await _lines(door, {**ASKED, "stream": True})
    assert sent[0] == ": ping"
    assert '"error"' in sent[-2]


async def test_a_whole_answer_is_not_pinged() -> None:
    async with (
        front_door(FakeDispatcher(delay_s=0.3), ping_s=0.1) as door,
        door.session.post(door.url + "/v1/chat/completions", json=ASKED) as response,
    ):
        assert response.status == 200
        assert (await response.json())["choices"]
