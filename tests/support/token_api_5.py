"""Both ends of the token API as they were in version 5, frozen: neighbours of today's ends."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from attrs import define, field, frozen

from commutator.contract.request import KvRetention, SamplingParams
from commutator.frames import FrameProtocol

FINISH_REASONS = {"stop", "length", "abort", "error"}


@frozen(kw_only=True)
class Info:
    kind: str
    version: str
    model: str
    max_model_len: int
    block_size: int
    kv_capacity_blocks: int
    data_parallel_size: int = 1
    continues_answers: bool = False


@frozen(kw_only=True)
class Request:
    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    lora_name: str | None = None
    cache_salt: str | None = None
    priority: int = 0
    data_parallel_rank: int | None = None
    generated_prefix: int = 0
    handover: Mapping[str, Any] | None = None
    retention: tuple[KvRetention, ...] = ()
    extra: Mapping[str, Any] = field(factory=dict)
    traceparent: str | None = None


@frozen(kw_only=True)
class Prompt:
    token_ids: Sequence[int]
    cache_salt: str | None = None
    lora_name: str | None = None


def pack(request: Request, tokens: Sequence[int]) -> bytes:
    return msgspec.msgpack.encode((request, array("I", tokens).tobytes()))


def unpack(packed: bytes) -> tuple[Request, list[int]]:
    request, data = msgspec.msgpack.decode(packed, type=tuple[Request, bytes])
    return request, list(array("I", data))


@define
class Server:
    """Answers each request with its own tokens. A hello of another version ends the connection."""

    requests: list[Request] = field(factory=list)
    prompts: list[Prompt] = field(factory=list)
    hellos: list[list[Any]] = field(factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        server = await asyncio.get_running_loop().create_server(self._connected, "127.0.0.1", 0)
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        server.close()

    def _connected(self) -> FrameProtocol:
        def on_frame(frame: list[Any]) -> None:
            match frame:
                case ["hello", 5, *instance] if len(instance) <= 1:
                    self.hellos.append(frame)
                    own = Info(
                        kind="old", version="1", model="m", max_model_len=128, block_size=16,
                        kv_capacity_blocks=8,
                    )  # fmt: skip
                    protocol.send(["info", own])
                case ["generate", int(key), bytes(packed)]:
                    request, tokens = unpack(packed)
                    self.requests.append(request)
                    protocol.send(["deltas", [[key, tokens, {"finish": "length"}]]])
                case ["ask", int(number), "kv", "prefetch", argument]:
                    self.prompts.append(msgspec.convert(argument, Prompt))
                    protocol.send(["answer", number, None])
                case _:
                    protocol.close()

        protocol = FrameProtocol(on_frame, lambda _: None)
        return protocol


class Client:
    """One connection to a server, which gets frames as they were."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Any] = asyncio.Queue()
        self.protocol = FrameProtocol(
            self.frames.put_nowait, lambda _: self.frames.put_nowait(None)
        )
        self.info: Info | None = None

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int) -> AsyncIterator[Client]:
        client = cls()
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: client.protocol, "127.0.0.1", port)
        client.protocol.send(["hello", 5, None])
        kind, value = await client.next()
        assert kind == "info"
        client.info = msgspec.convert(value, Info)
        yield client
        client.protocol.close()

    async def next(self) -> Any:
        """The next frame; None when the connection has ended."""
        async with asyncio.timeout(5):
            return await self.frames.get()

    async def generate(self, request: Request, tokens: Sequence[int]) -> list[Any]:
        """The next frame after a request of key 1."""
        self.protocol.send(["generate", 1, pack(request, tokens)])
        frame: list[Any] = await self.next()
        return frame

    async def ask(self, question: Literal["prefetch"], prompt: Prompt) -> list[Any]:
        self.protocol.send(["ask", 2, "kv", question, prompt])
        frame: list[Any] = await self.next()
        return frame


def finish_of(frame: list[Any]) -> tuple[str, str | None]:
    """The reason of the last delta, which must be one of those days, and its error."""
    ((_, _, extras),) = frame[1]
    assert extras["finish"] in FINISH_REASONS
    return extras["finish"], extras.get("error")
