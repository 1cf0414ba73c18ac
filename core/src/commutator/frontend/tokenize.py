"""The handlers of /tokenize and /detokenize."""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend.body import read_request
from commutator.frontend.prompts import chat_prompt, encode_text
from commutator.frontend.requests import DetokenizeRequest, TokenizeRequest
from commutator.frontend.responses import DetokenizeResponse, TokenizeResponse
from commutator.frontend.services import SERVICES

__all__ = ["detokenize", "tokenize"]

_INLINE_TOKENS = 10_000


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the token ids of a text or of a rendered conversation."""
    services = request.app[SERVICES]
    body = await read_request(request, TokenizeRequest)
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
    return _json(
        TokenizeResponse(
            count=len(token_ids),
            max_model_len=services.max_model_len(name),
            tokens=tuple(token_ids),
            token_strs=tuple(map(model.token_text, token_ids)) if body.return_token_strs else None,
        )
    )


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of token ids, special tokens included."""
    body = await read_request(request, DetokenizeRequest)
    _, model = request.app[SERVICES].text_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise RequestError(
            f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}",
            "tokens",
        )

    def decode() -> str:
        return model.decode(body.tokens, skip_special_tokens=False)

    small = len(body.tokens) <= _INLINE_TOKENS
    return _json(DetokenizeResponse(decode() if small else await asyncio.to_thread(decode)))


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
