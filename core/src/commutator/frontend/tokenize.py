"""The handlers of /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend.body import read_request
from commutator.frontend.deadline import timeout_of
from commutator.frontend.prompts import chat_prompt, encode_text
from commutator.frontend.requests import DetokenizeRequest, TokenizeRequest
from commutator.frontend.responses import DetokenizeResponse, TokenizeResponse
from commutator.frontend.services import SERVICES, Services

__all__ = ["detokenize", "tokenize"]

T = TypeVar("T")
_INLINE_TOKENS = 10_000


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids of a text or of a rendered conversation."""
    return await _serve(request, TokenizeRequest, _tokenize)


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    return await _serve(request, DetokenizeRequest, _detokenize)


async def _serve(
    request: web.Request, cls: type[T], answer: Callable[[Services, T], Awaitable[object]]
) -> web.Response:
    """Within the limits of every request: a text may be as long as any prompt."""
    services = request.app[SERVICES]
    limit_s = timeout_of(request, services.config.request_timeout_s)
    async with services.time_limits.of(limit_s):
        body = await read_request(request, cls)
        async with services.limiter:
            answered = await answer(services, body)
    return web.Response(body=msgspec.json.encode(answered), content_type="application/json")


async def _tokenize(services: Services, body: TokenizeRequest) -> TokenizeResponse:
    name, model = services.text_model(body.model)
    cache = services.prompt_caches[name]
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("expected either prompt or messages", "prompt")
    if body.prompt is None:
        prompt = await chat_prompt(model, cache, body)
    else:
        prompt = await encode_text(
            cache, body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    token_ids = prompt.token_ids
    return TokenizeResponse(
        count=len(token_ids),
        max_model_len=services.max_model_len(name),
        tokens=tuple(token_ids),
        token_strs=tuple(map(model.token_text, token_ids)) if body.return_token_strs else None,
    )


async def _detokenize(services: Services, body: DetokenizeRequest) -> DetokenizeResponse:
    _, model = services.text_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise RequestError(
            f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}",
            "tokens",
        )

    def decode() -> str:
        return model.decode(body.tokens, skip_special_tokens=False)

    small = len(body.tokens) <= _INLINE_TOKENS
    return DetokenizeResponse(decode() if small else await asyncio.to_thread(decode))
