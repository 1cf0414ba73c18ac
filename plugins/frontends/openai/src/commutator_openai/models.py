"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from commutator.errors import RequestError
from commutator.frontend import FrontendServices
from commutator_openai.answers import send_json
from commutator_openai.body import read_request
from commutator_openai.middleware import SERVICES, caller, time_limit
from commutator_openai.planning import chat_prompt
from commutator_openai.protocol.requests import DetokenizeRequest, TokenizeRequest
from commutator_openai.protocol.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)

__all__ = [
    "detokenize",
    "list_models",
    "retrieve_model",
    "tokenize",
]

T = TypeVar("T")
_INLINE_TOKENS = 10_000


async def tokenize(request: web.Request) -> web.StreamResponse:
    """POST /tokenize: the token ids of a text or of a rendered conversation."""
    return await _serve(request, TokenizeRequest, _tokenize)


async def detokenize(request: web.Request) -> web.StreamResponse:
    """POST /detokenize: the text of token ids, special tokens included."""
    return await _serve(request, DetokenizeRequest, _detokenize)


async def _serve(
    request: web.Request,
    cls: type[T],
    answer: Callable[[FrontendServices, T], Awaitable[bytes]],
) -> web.StreamResponse:
    """With the same limits as a generation: a text may be as long as any prompt."""
    services = request.app[SERVICES]
    async with time_limit(request):
        body = await read_request(request, cls)
        async with services.limiter.of(caller(request, user=None, session_id=None)):
            data = await answer(services, body)
    return await send_json(request, data)


async def _tokenize(services: FrontendServices, body: TokenizeRequest) -> bytes:
    name, model = services.text_model(body.model)
    prompts = services.preprocessors[name]
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages, and not both", "prompt")
    if body.prompt is None:
        prompt = await chat_prompt(prompts, body)
    else:
        prompt = await prompts.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    token_ids, max_model_len = prompt.token_ids, services.max_model_len(name)

    def response() -> bytes:
        texts = tuple(map(model.token_text, token_ids)) if body.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(len(token_ids), max_model_len, tuple(token_ids), texts)
        )

    inline = len(token_ids) <= _INLINE_TOKENS
    return response() if inline else await services.work.run(response)


async def _detokenize(services: FrontendServices, body: DetokenizeRequest) -> bytes:
    name, model = services.text_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise RequestError(
            f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}",
            "tokens",
        )

    text = await services.preprocessors[name].decode(body.tokens)
    return msgspec.json.encode(DetokenizeResponse(text))


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    services = request.app[SERVICES]
    return _json(ModelList("list", tuple(_card(services, name) for name in services.models)))


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    services = request.app[SERVICES]
    name, _ = services.text_model(request.match_info["id"])
    return _json(_card(services, name))


def _card(services: FrontendServices, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=services.started_unix_s,
        owned_by="commutator",
        max_model_len=services.max_model_len(name),
    )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
