"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import web

from commutator.contract.principal import Principal
from commutator.errors import RequestError
from commutator.frontend import FrontendServices, salted
from commutator_openai.answers import send_json
from commutator_openai.body import read_request
from commutator_openai.middleware import EXCHANGE, SERVICES, caller, time_limit
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
    answer: Callable[[FrontendServices, Principal, T], Awaitable[bytes]],
) -> web.StreamResponse:
    """With the same limits as a generation: a text may be as long as any prompt."""
    services = request.app[SERVICES]
    async with time_limit(request):
        body = await read_request(request, cls)
        async with services.limiter.of(caller(request, user=None, session_id=None)):
            data = await answer(services, request[EXCHANGE].principal, body)
    return await send_json(request, [data])


async def _tokenize(
    services: FrontendServices, principal: Principal, body: TokenizeRequest
) -> bytes:
    name, model = services.text_model(body.model, principal)
    salt = salted(principal, None)
    prompts = services.preprocessors[name]
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages, and not both", "prompt")
    if body.prompt is None:
        prompt = await chat_prompt(prompts, body, salt)
    else:
        prompt = await prompts.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, salt=salt
        )
    token_ids, max_model_len = prompt.token_ids, services.max_model_len(name, principal)

    def response() -> bytes:
        texts = tuple(map(model.token_text, token_ids)) if body.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(len(token_ids), max_model_len, tuple(token_ids), texts)
        )

    inline = len(token_ids) <= _INLINE_TOKENS
    return response() if inline else await services.work.run(response)


async def _detokenize(
    services: FrontendServices, principal: Principal, body: DetokenizeRequest
) -> bytes:
    name, model = services.text_model(body.model, principal)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise RequestError(
            f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}",
            "tokens",
        )

    text = await services.preprocessors[name].decode(body.tokens)
    return msgspec.json.encode(DetokenizeResponse(text))


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    services, principal = request.app[SERVICES], request[EXCHANGE].principal
    names = services.models_for(principal)
    return _json(ModelList("list", tuple(_card(services, name, principal) for name in names)))


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    services, principal = request.app[SERVICES], request[EXCHANGE].principal
    name, _ = services.text_model(request.match_info["id"], principal)
    return _json(_card(services, name, principal))


def _card(services: FrontendServices, name: str, principal: Principal) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=services.started_unix_s,
        owned_by="commutator",
        max_model_len=services.max_model_len(name, principal),
    )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
