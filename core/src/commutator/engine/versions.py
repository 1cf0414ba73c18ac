"""The versions of the token API: both ends use the highest that both speak.

The newest version's messages are those of ``commutator.engine.protocol``. The version before it is
spoken as well, so that a deployment can be updated worker by worker, in any order. What it cannot
say is refused before it is sent; nothing is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from attrs import evolve, field, frozen

from commutator.contract.request import (
    FinishReason,
    GenerateRequest,
    KvRetention,
    SamplingParams,
    TokenDelta,
)
from commutator.contract.worker import KvPrompt
from commutator.engine.protocol import (
    pack_delta,
    pack_request,
    pack_tokens,
    unpack_request,
    unpack_tokens,
)
from commutator.errors import RequestError
from commutator.frames import Versions

__all__ = ["PROTOCOLS", "Codec", "codec_of"]


PROTOCOLS = Versions(5, 6)
"""Of the token API, here."""


class Codec:
    """How one version says what a connection carries; this one, the newest."""

    version = PROTOCOLS.newest

    def pack_request(self, request: GenerateRequest) -> bytes:
        """Raises RequestError for what this version cannot say, and for impossible token ids."""
        return pack_request(request)

    def unpack_request(self, packed: bytes) -> GenerateRequest:
        """Raises RequestError for what cannot be served as asked, ValueError for no request."""
        return unpack_request(packed)

    def pack_prompt(self, prompt: KvPrompt) -> Any:
        """Raises RequestError for what this version cannot say."""
        return prompt

    def unpack_prompt(self, value: Any) -> KvPrompt:
        """Raises RequestError for what cannot be answered as asked, ValueError for no prompt."""
        return msgspec.convert(value, KvPrompt)

    def pack_delta(self, key: int, delta: TokenDelta) -> list[Any]:
        """A delta as the compact array of a "deltas" frame."""
        return pack_delta(key, delta)


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
_NOT_IN_5 = ("adapter", "constraint", "media", "session", "options")
_FINISHES_NOT_IN_5 = (FinishReason.TOOL_CALLS, FinishReason.CONTENT_FILTER)
_decoder_5 = msgspec.msgpack.Decoder(tuple[_Request5, bytes])


class _Codec5(Codec):
    """Version 5 names adapters by a name alone, and has options that nobody checks."""

    version = 5

    def pack_request(self, request: GenerateRequest) -> bytes:
        for name in _NOT_IN_5:
            if getattr(request, name):
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
        return pack_delta(key, delta)


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
