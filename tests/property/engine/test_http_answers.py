"""Answers are the same however the network cuts them, and what breaks off is no whole one."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from tests.support.fake_transport import FakeTransport

from commutator.errors import EngineUnavailableError
from commutator_engine_kit.http_connections import HttpConnections

Framing = Literal["chunked", "length", "end"]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@frozen
class Answer:
    """One that a server sends."""

    pieces: Sequence[bytes]
    framing: Framing
    announced: bool
    """Whether another status comes before, as from a server that is asked to continue."""

    @property
    def sent(self) -> bytes:
        body = b"".join(self.pieces)
        before = b"HTTP/1.1 100 Continue\r\n\r\n" if self.announced else b""
        if self.framing == "length":
            return before + OK + b"Content-Length: %d\r\n\r\n" % len(body) + body
        if self.framing == "end":
            return before + OK + b"\r\n" + body
        chunks = b"".join(b"%x;of=it\r\n%b\r\n" % (len(piece), piece) for piece in self.pieces)
        return before + OK + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\nA: b\r\n\r\n"


answers = st.builds(
    Answer,
    st.lists(st.binary(min_size=1, max_size=40), max_size=5),
    st.sampled_from(["chunked", "length", "end"]),
    st.booleans(),
)


class Server:
    """Connections of one client, whose ends are here."""

    def __init__(self) -> None:
        self.transports: list[FakeTransport] = []
        self.connections = HttpConnections("X", self._connect, max_idle_s=60)

    async def _connect(self, factory: Callable[[], asyncio.Protocol]) -> None:
        self.transports.append(FakeTransport(factory))

    async def send(self, data: bytes, cuts: Sequence[int], *, close: bool) -> None:
        """On the newest connection, with a turn of the event loop for the client at each cut."""
        await asyncio.sleep(0)
        places = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
        for begin, end in itertools.pairwise(places):
            self.transports[-1].receive(data[begin:end])
            await asyncio.sleep(0)
        if close:
            self.transports[-1].lose()

    async def ask(self, got: list[bytes]) -> None:
        async with await self.connections.ask(b"request") as answer:
            assert answer.status == 200
            async for piece in answer:
                got.append(piece)  # noqa: PERF401 - those before a failure count


@given(st.lists(st.tuples(answers, st.lists(st.integers(0, 400))), min_size=1, max_size=3))
def test_cut_anywhere(told: list[tuple[Answer, list[int]]]) -> None:
    async def run() -> None:
        server = Server()
        connections = 0
        is_new = True
        for answer, cuts in told:
            got: list[bytes] = []
            asking = asyncio.create_task(server.ask(got))
            await server.send(answer.sent, cuts, close=answer.framing == "end")
            await asking
            assert b"".join(got) == b"".join(answer.pieces)
            connections += is_new
            is_new = answer.framing == "end"
        assert len(server.transports) == connections, "others are used again"
        await server.connections.close()
        assert all(transport.closed for transport in server.transports)

    asyncio.run(run())


@given(answers.filter(lambda answer: answer.framing != "end"), st.integers(0), st.booleans())
def test_what_breaks_off_is_no_whole_answer(answer: Answer, length: int, used: bool) -> None:
    async def run() -> None:
        server = Server()
        if used:
            first = asyncio.create_task(server.ask([]))
            await server.send(OK + b"Content-Length: 0\r\n\r\n", [], close=False)
            await first
        got: list[bytes] = []
        asking = asyncio.create_task(server.ask(got))
        await server.send(answer.sent[: length % len(answer.sent)], [], close=True)
        with pytest.raises(EngineUnavailableError, match=r"^X: connection lost \("):
            await asking
        assert b"".join(answer.pieces).startswith(b"".join(got))
        assert server.transports[-1].written == [b"request"] * (2 if used else 1), "sent once"
        assert len(server.transports) == 1

    asyncio.run(run())


@given(st.lists(st.binary(max_size=30) | st.sampled_from([OK, b"\r\n", b"0\r\n", b"HTTP/1.1 2"])))
def test_junk_ends(parts: list[bytes]) -> None:
    async def run() -> None:
        server = Server()
        got: list[bytes] = []
        asking = asyncio.create_task(server.ask(got))
        for part in parts:
            await server.send(part, [], close=False)
        await server.send(b"", [], close=True)
        try:
            await asking
        except EngineUnavailableError:
            pass
        else:
            sent = b"".join(parts)
            assert OK in sent, "no other answer is one"
        await server.connections.close()

    asyncio.run(run())


@given(answers.filter(lambda answer: answer.framing != "end"), st.binary(min_size=1, max_size=60))
def test_what_nobody_asked_for_is_nobodys_answer(answer: Answer, rest: bytes) -> None:
    async def run() -> None:
        server = Server()
        got: list[bytes] = []
        asking = asyncio.create_task(server.ask(got))
        await server.send(answer.sent + b"HTTP/1.1 200 OK\r\n" + rest, [], close=False)
        await asking
        assert b"".join(got) == b"".join(answer.pieces)
        assert server.transports[0].closed

    asyncio.run(run())
