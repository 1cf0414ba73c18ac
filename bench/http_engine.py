"""An engine's HTTP server that costs next to nothing: ``python -m bench.http_engine PORT``.

It answers each request with the same stream of 32 tokens, in two writes, without reading more of
it than its path and its length: chats as OpenAI's API has them, and tokens as vLLM's server.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any, cast

import uvloop

MODEL = "smollm2-135m"
TOKENS = 32
_BURST = 16
_FIRST_TOKEN = 500
_HEAD_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
_CHUNKED = b"transfer-encoding: chunked"
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_HTTP_2 = b"PRI * HTTP/2"


def event(data: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


def chat_event(delta: dict[str, Any], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    of_all = {"id": f"chatcmpl-{'0' * 32}", "object": "chat.completion.chunk", "created": 1}
    return event({**of_all, "model": MODEL, "choices": [choice]})


def token_event(number: int) -> bytes:
    finish = "length" if number == TOKENS - 1 else None
    choice = {"index": 0, "token_ids": [_FIRST_TOKEN + number], "finish_reason": finish}
    return event({"choices": [choice]})


CHAT = [
    *(chat_event({"content": f" word{number}"}) for number in range(TOKENS)),
    chat_event({}, "length"),
]
TOKEN_STREAM = [
    *map(token_event, range(TOKENS)),
    event({"choices": [], "usage": {"prompt_tokens_details": {"cached_tokens": 0}}}),
]


def in_two(events: Sequence[bytes]) -> tuple[bytes, bytes]:
    """A chunked response, cut after the first burst."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    first, second = b"".join(events[:_BURST]), b"".join([*events[_BURST:], b"data: [DONE]\n\n"])
    return head + chunk(first), chunk(second) + b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(body: str, kind: str = "application/json", status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    return (head + body).encode()


STREAMS = {
    b"/v1/chat/completions": in_two(CHAT),
    b"/inference/v1/generate": in_two(TOKEN_STREAM),
}
PAGES = {
    b"/health": whole(""),
    b"/version": whole('{"version":"0.0"}'),
    b"/v1/models": whole(
        json.dumps({"object": "list", "data": [{"id": MODEL, "max_model_len": 8192}]})
    ),
    b"/metrics": whole(
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100000"} 1.0\n',
        "text/plain",
    ),
}
MISSING = whole('{"detail":"Not Found"}', status="404 Not Found")


class Connection(asyncio.Protocol):
    """Requests of one client, one after the other."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._wanted = 0
        """Bytes of the request that is being read; 0 before its headers are complete."""
        self._path = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if not self._buffer and data.startswith(_HTTP_2):  # as a router asks for gRPC
            self._transport.close()
            return
        self._buffer += data
        while self._read_head() and len(self._buffer) >= self._wanted:
            del self._buffer[: self._wanted]
            self._wanted = 0
            self._answer()

    def _read_head(self) -> bool:
        if not self._wanted and (end := self._buffer.find(_HEAD_END)) >= 0:
            head = bytes(self._buffer[:end])
            self._path = head.split(b" ", 2)[1]
            lower = head.lower()
            if _CHUNKED in lower:  # of JSON, which holds no line break of HTTP
                last = self._buffer.find(_LAST_CHUNK, end)
                self._wanted = last + len(_LAST_CHUNK) if last >= 0 else 0
                return last >= 0
            at = lower.find(_LENGTH)
            length = int(lower[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            self._wanted = end + len(_HEAD_END) + length
        return self._wanted > 0

    def _answer(self) -> None:
        stream = STREAMS.get(self._path)
        if stream is None:
            self._transport.write(PAGES.get(self._path, MISSING))
            return
        first, second = stream
        self._transport.write(first)
        asyncio.get_running_loop().call_soon(self._transport.write, second)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
