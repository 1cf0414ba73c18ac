"""/v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from commutator.contract.principal import Principal
from commutator.errors import RequestError
from commutator.frontend import Call, FrontendServices, conversation_prompt, salted
from commutator_openai.chat import conversation_of, read_request
from commutator_openai.requests import DetokenizeRequest, TokenizeRequest
from commutator_openai.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from commutator_openai.tolerance import IGNORED_HEADER, ignored_header

__all__ = [
    "detokenize",
    "list_models",
    "retrieve_model",
    "tokenize",
]

T = TypeVar("T")
_INLINE_TOKENS = 10_000


async def tokenize(call: Call, *, strict: bool) -> None:
    """POST /tokenize: the token ids of a text or of a rendered conversation."""
    await _serve(call, TokenizeRequest, _tokenize, strict=strict)


async def detokenize(call: Call, *, strict: bool) -> None:
    """POST /detokenize: the text of token ids, special tokens included."""
    await _serve(call, DetokenizeRequest, _detokenize, strict=strict)


async def _serve(
    call: Call,
    cls: type[T],
    answer: Callable[[FrontendServices, Principal, T], Awaitable[bytes]],
    *,
    strict: bool,
) -> None:
    """With the same limits as a generation: a text may be as long as any prompt."""
    services = call.services
    async with call.time_limit():
        body, ignored = await read_request(call, cls, strict=strict)
        if ignored:
            call.answer_headers[IGNORED_HEADER] = ignored_header(ignored)
        async with services.limiter.of(call.caller()):
            data = await answer(services, call.principal, body)
    await call.reply([data])


async def _tokenize(
    services: FrontendServices, principal: Principal, body: TokenizeRequest
) -> bytes:
    name, model = services.text_model(body.model, principal)
    salt = salted(principal, None)
    prompts = services.preprocessors[name]
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages, and not both", "prompt")
    if body.prompt is None:
        special = bool(body.add_special_tokens)
        conversation = conversation_of(body)
        prompt = await conversation_prompt(prompts, conversation, salt, add_special_tokens=special)
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


async def list_models(call: Call) -> None:
    """GET /v1/models."""
    services, principal = call.services, call.principal
    names = services.models_for(principal)
    await _reply(call, ModelList("list", tuple(_card(services, name, principal) for name in names)))


async def retrieve_model(call: Call) -> None:
    """GET /v1/models/{id}."""
    services, principal = call.services, call.principal
    name, _ = services.text_model(call.parts["id"], principal)
    await _reply(call, _card(services, name, principal))


def _card(services: FrontendServices, name: str, principal: Principal) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=services.started_unix_s,
        owned_by="commutator",
        max_model_len=services.max_model_len(name, principal),
    )


async def _reply(call: Call, value: object) -> None:
    await call.reply([msgspec.json.encode(value)])
