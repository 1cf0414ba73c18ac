"""The messages of the token API, each one frame of ``commutator.frames``.

    client -> server                                server -> client
    ["hello", version, instance]                    ["info", EngineInfo and "protocols"]
    ["use", version]                                ["not_me", instance | nil]
    ["ping"]                                        ["pong"]
    ["generate", key, request]                      ["deltas", [[key, ids, extras | nil], ...]]
    ["abort", key]                                  ["refused", key, reason, kind]
    ["ask", number, what, argument...]              ["answer", number, value]
                                                    ["failed", number, reason, kind]

The client says hello in the oldest version that it speaks. The server adds to its information which
versions it speaks, as [oldest, newest]; servers before version 6 do not, and speak the version of
the hello alone. If both speak a higher version, the client names the highest in "use", and what
either end sends after that is of that version. The version before the newest is spoken as well, so
that a deployment can be updated worker by worker, in any order. What it cannot say is refused
before it is sent; nothing is left out.

A client that knows which instance of the worker it means, by the worker's record, names it (nil: it
takes any); another instance answers "not_me" with its own, and closes the connection: a port may
have been given to another process since.

``key`` numbers the requests of one connection. ``request`` is a GenerateRequest without its tokens,
and these as little-endian 32-bit integers: the array of both in MessagePack, sent as bytes, so that
it is decoded only once, into its class. A "deltas" frame holds everything
that one engine tick produced for this connection; ``extras`` is a map of the fields that are set.
``what`` is "load", "transfer_statistics", "refused_connections" or "reset_prefix_cache", without
arguments; or "kv" with a ``KvQuestion`` about storage tiers and its argument: nil, a ``KvPrompt``,
the name of one tier (nil: all) or a list of addresses. Only "kv" may fail: ``kind`` is "no_tiers"
for an engine without tiers, otherwise "engine".
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from attrs import evolve, field, frozen

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    KvRetention,
    SamplingParams,
    TokenDelta,
    TokenLogprob,
)
from commutator.contract.worker import KvPrompt
from commutator.errors import RequestError
from commutator.frames import Versions

INSTANCE = "COMMUTATOR_INSTANCE"
"""The environment variable with a worker process's instance, as ``WorkerRecord.instance``."""

SERVICE = "token API"
"""The service that both ends of a connection prove themselves for."""


KvQuestion = Literal[
    "statistics", "contents", "explain", "prefetch", "evict", "verify", "set_peers"
]
"""The last part of the names of ``EngineClient``'s methods about storage tiers."""


_MOST_UNREAD = 64
"""Deltas of one request that are kept apart for its reader."""

_FINISH_REASONS = {reason.value: reason for reason in FinishReason}


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """The tokens as little-endian 32-bit integers. Raises RequestError for one that is none."""
    try:
        tokens = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise RequestError(f"prompt: a token id is out of range: {error}", "prompt") from error
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens.tobytes()


def unpack_tokens(data: bytes) -> array[int]:
    """The inverse of ``pack_tokens``. Raises ValueError for a token that is cut off."""
    tokens = array("I", data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def unpack_delta(token_ids: list[int], extras: dict[str, Any] | None) -> TokenDelta:
    """The inverse of ``Codec.pack_delta``, without the key."""
    if extras is None:
        return TokenDelta(token_ids=tuple(token_ids))
    finish = extras.get("finish")
    logprobs = extras.get("logprobs", ())
    return TokenDelta(
        token_ids=tuple(token_ids),
        logprobs=tuple(
            TokenLogprob(token_id=token, logprob=logprob, top=tuple((i, p) for i, p in top))
            for token, logprob, top in logprobs
        )
        if logprobs
        else (),
        finish_reason=_FINISH_REASONS[finish] if finish is not None else None,
        stop_reason=extras.get("stop"),
        prompt_logprobs=tuple(
            TokenLogprob(token_id=token, logprob=logprob, top=tuple((i, p) for i, p in top), rank=r)
            for token, logprob, top, r in extras.get("prompt_logprobs", ())
        ),
        cached_tokens=extras.get("cached"),
        error=extras.get("error"),
        handover=extras.get("handover"),
        vectors=extras.get("vectors", b""),
        refused=extras.get("refused", False),
        handover_failed=extras.get("handover_failed", False),
    )


PROTOCOLS = Versions(5, 6)
"""Of the token API, here."""

_request_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(tuple[GenerateRequest, bytes])


class Codec:
    """How one version says what a connection carries; this one, the newest."""

    version = PROTOCOLS.newest

    def pack_request(self, request: GenerateRequest) -> bytes:
        """The last part of a "generate" frame.

        Raises RequestError for what this version cannot say, and when a token id is no unsigned
        32-bit integer.
        """
        tokens = pack_tokens(request.token_ids)
        return _request_encoder.encode((evolve(request, token_ids=()), tokens))

    def unpack_request(self, packed: bytes) -> GenerateRequest:
        """Raises RequestError for what cannot be served as asked, ValueError for no request."""
        request, data = _request_decoder.decode(packed)
        return evolve(request, token_ids=unpack_tokens(data))

    def pack_prompt(self, prompt: KvPrompt) -> Any:
        """Raises RequestError for what this version cannot say."""
        return prompt

    def unpack_prompt(self, value: Any) -> KvPrompt:
        """Raises RequestError for what cannot be answered as asked, ValueError for no prompt."""
        return msgspec.convert(value, KvPrompt)

    def pack_delta(self, key: int, delta: TokenDelta) -> list[Any]:
        """A delta as the compact array of a "deltas" frame."""
        extras: dict[str, Any] = {}
        if delta.logprobs:
            extras["logprobs"] = [(lp.token_id, lp.logprob, lp.top) for lp in delta.logprobs]
        if delta.prompt_logprobs:
            extras["prompt_logprobs"] = [
                (lp.token_id, lp.logprob, lp.top, lp.rank) for lp in delta.prompt_logprobs
            ]
        if delta.finish_reason is not None:
            extras["finish"] = delta.finish_reason.value
        if delta.stop_reason is not None:
            extras["stop"] = delta.stop_reason
        if delta.cached_tokens is not None:
            extras["cached"] = delta.cached_tokens
        if delta.vectors:
            extras["vectors"] = delta.vectors
        if delta.error is not None:
            extras["error"] = delta.error
        if delta.handover is not None:
            extras["handover"] = delta.handover
        if delta.refused or delta.handover_failed:
            extras |= {"refused": delta.refused, "handover_failed": delta.handover_failed}
        return [key, delta.token_ids, extras or None]


@frozen(kw_only=True)
class _Request5:
    """A request as version 5 has it."""

    request_id: str
    token_ids: Sequence[int] = ()
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
class _Prompt5:
    """A prompt as version 5 has it."""

    token_ids: Sequence[int]
    cache_salt: str | None = None
    lora_name: str | None = None


_SAME = tuple(
    name for name in _Request5.__annotations__ if name not in ("token_ids", "lora_name", "extra")
)
_NOT_IN_5 = ("adapter", "constraint", "media", "options", "pooling", "prompt_logprobs")
"""What an answer would be wrong without; a session is a hint."""
_FINISHES_NOT_IN_5 = (FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER)
_decoder_5 = msgspec.msgpack.Decoder(tuple[_Request5, bytes])


class _Codec5(Codec):
    """Version 5 names adapters by a name alone, and has options that nobody checks."""

    version = 5

    def pack_request(self, request: GenerateRequest) -> bytes:
        for name in _NOT_IN_5:
            if getattr(request, name) not in (None, (), {}):
                raise _too_old(name)
        same = {name: getattr(request, name) for name in _SAME}
        return msgspec.msgpack.encode((_Request5(**same), pack_tokens(request.token_ids)))

    def unpack_request(self, packed: bytes) -> GenerateRequest:
        request, data = _decoder_5.decode(packed)
        _refuse_name(request.lora_name)
        same = {name: getattr(request, name) for name in _SAME}
        return GenerateRequest(**same, token_ids=unpack_tokens(data), options=request.extra)

    def pack_prompt(self, prompt: KvPrompt) -> Any:
        if prompt.adapter is not None:
            raise _too_old("adapter")
        return _Prompt5(token_ids=prompt.token_ids, cache_salt=prompt.cache_salt)

    def unpack_prompt(self, value: Any) -> KvPrompt:
        prompt = msgspec.convert(value, _Prompt5)
        _refuse_name(prompt.lora_name)
        return KvPrompt(token_ids=prompt.token_ids, cache_salt=prompt.cache_salt)

    def pack_delta(self, key: int, delta: TokenDelta) -> list[Any]:
        if delta.finish_reason in _FINISHES_NOT_IN_5:
            error = (
                f"the answer ended with {delta.finish_reason}, which version 5 of the token API "
                "cannot say; update the front door"
            )
            delta = evolve(delta, finish_reason=FinishReason.ERROR, error=error)
        return super().pack_delta(key, delta)


def _too_old(name: str) -> RequestError:
    return RequestError(
        f"{name}: the worker speaks version 5 of the token API, which has no such field; update "
        "the worker, or leave it out",
        name,
        "unsupported_parameter",
    )


def _refuse_name(adapter: str | None) -> None:
    if adapter is not None:
        raise RequestError(
            f"adapter {adapter!r:.80}: version 5 of the token API names it without its content; "
            "update the front door",
            "adapter",
        )


_CODECS: Mapping[int, Codec] = {codec.version: codec for codec in (_Codec5(), Codec())}


def codec_of(version: int) -> Codec | None:
    """The messages of a version; None: it is not spoken here."""
    return _CODECS.get(version)


class DeltaStream:
    """An async iterator that a connection feeds. Deltas that accumulate are merged into one.

    A reader that is slower than the engine thus writes once for several ticks.
    """

    def __init__(self, abort: Callable[[], None]) -> None:
        self._abort = abort
        self._ready: deque[TokenDelta] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._ended = False
        """The engine finished or failed the request; nothing more comes."""
        self._exhausted = False

    @property
    def unread(self) -> int:
        """The number of deltas that wait for the reader."""
        return len(self._ready)

    def feed(self, delta: TokenDelta) -> None:
        self._ready.append(delta)
        if len(self._ready) > _MOST_UNREAD:
            self._ready = deque([merge(self._ready)])
        if delta.finish_reason is not None:
            self._ended = True
        self._wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, after what has already arrived."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake()

    def __aiter__(self) -> DeltaStream:
        return self

    async def __anext__(self) -> TokenDelta:
        while not self._ready:
            if self._exhausted or (self._ended and self._error is None):
                raise StopAsyncIteration
            if self._error is not None:
                self._exhausted = True
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if len(self._ready) == 1:
            return self._ready.popleft()
        merged = merge(self._ready)
        self._ready.clear()
        return merged

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort()
        self._ready.clear()
        self._exhausted = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(deltas: deque[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one request as one."""
    last, cached = deltas[-1], None
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    for delta in deltas:
        token_ids += delta.token_ids
        logprobs += delta.logprobs
        prompt_logprobs += delta.prompt_logprobs
        cached = delta.cached_tokens if cached is None else cached
    return TokenDelta(
        token_ids=tuple(token_ids),
        logprobs=tuple(logprobs),
        prompt_logprobs=tuple(prompt_logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cached_tokens=cached,
        handover=last.handover,
        vectors=last.vectors,
        error=last.error,
        refused=last.refused,
        handover_failed=last.handover_failed,
    )
