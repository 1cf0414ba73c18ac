"""/v1/models, /tokenize, /detokenize and /tokenizer_info; /version and /load."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from attrs import evolve

import commutator
from commutator.contract.principal import Principal
from commutator.errors import RequestError
from commutator.frontend import Call, FrontendServices, conversation_prompt, salted
from commutator.tokenizer import TextModel
from commutator_openai.chat import conversation_of, read_request
from commutator_openai.requests import DetokenizeRequest, TokenizeRequest
from commutator_openai.responses import DetokenizeResponse, ModelCard, ModelList, TokenizeResponse
from commutator_openai.tolerance import IGNORED_HEADER, ignored_header

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
    answer: Callable[[Call, T], Awaitable[bytes]],
    *,
    strict: bool,
) -> None:
    """With the same limits as a generation: a text may be as long as any prompt."""
    services = call.services
    async with call.time_limit():
        body, ignored = await read_request(call, cls, strict=strict)
        if isinstance(body, TokenizeRequest) and body.tools:
            template = call.text_model(body.model)[1].chat_template
            if template is not None and not template.knows_tools:
                # What is counted is what the template makes of the conversation.
                body, ignored = evolve(body, tools=None), (*ignored, "tools")
        if ignored:
            call.answer_headers[IGNORED_HEADER] = ignored_header(ignored)
        async with services.limiter.of(call.caller()):
            data = await answer(call, body)
    await call.reply([data])


async def _tokenize(call: Call, body: TokenizeRequest) -> bytes:
    services, principal = call.services, call.principal
    name, model = call.text_model(body.model)
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
        pieces = map(model.tokenizer.id_to_token, token_ids)
        texts = tuple(one or "" for one in pieces) if body.return_token_strs else None
        return msgspec.json.encode(
            TokenizeResponse(len(token_ids), max_model_len, tuple(token_ids), texts)
        )

    inline = len(token_ids) <= _INLINE_TOKENS
    return response() if inline else await services.work.run(response)


async def _detokenize(call: Call, body: DetokenizeRequest) -> bytes:
    services = call.services
    name, model = call.text_model(body.model)
    if body.tokens and max(body.tokens) >= model.vocab_size:
        raise RequestError(
            f"tokens: expected token ids below {model.vocab_size}, got {max(body.tokens)}",
            "tokens",
        )

    text = await services.preprocessors[name].decode(body.tokens)
    return msgspec.json.encode(DetokenizeResponse(text))


async def tokenizer_info(call: Call) -> None:
    """GET /tokenizer_info: what clients that render and count by themselves need to know."""
    services = call.services
    name, model = call.text_model(call.query.get("model"))
    longest = services.max_model_len(name, call.principal)
    await _reply(call, _tokenizer_info(model, longest))


def _tokenizer_info(model: TextModel, longest: int) -> dict[str, Any]:
    """By the names of transformers' `tokenizer_config.json`."""
    added = model.tokenizer.get_added_tokens_decoder()
    template = model.chat_template
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **model.special_tokens,
        "model_max_length": longest,
        "chat_template": None if template is None else template.source,
        "added_tokens_decoder": {
            str(token_id): {
                "content": token.content,
                "special": token.special,
                "lstrip": token.lstrip,
                "rstrip": token.rstrip,
                "normalized": token.normalized,
                "single_word": token.single_word,
            }
            for token_id, token in sorted(added.items())
        },
    }


async def version(call: Call) -> None:
    """GET /version."""
    await _reply(call, {"version": commutator.__version__})


async def load(call: Call) -> None:
    """GET /load: the requests that this front door's process has in hand."""
    limiter = call.services.limiter
    await _reply(call, {"server_load": limiter.running + limiter.waiting})


async def list_models(call: Call) -> None:
    """GET /v1/models."""
    services, principal = call.services, call.principal
    names = services.names_for(principal)
    await _reply(call, ModelList("list", tuple(_card(services, name, principal) for name in names)))


async def retrieve_model(call: Call) -> None:
    """GET /v1/models/{id}."""
    services, principal = call.services, call.principal
    name = call.parts["id"]
    call.text_model(name)  # raises where it is not served
    await _reply(call, _card(services, name, principal))


def _card(services: FrontendServices, name: str, principal: Principal) -> ModelCard:
    traffic, means = services.traffic, services.meant(name, principal)
    adapter = None if traffic is None else traffic.adapter(name, means[0])
    return ModelCard(
        id=name,
        object="model",
        created=services.started_unix_s,
        owned_by="commutator",
        max_model_len=services.least_model_len(name, principal),
        parent=None if adapter is None else means[0],
    )


async def _reply(call: Call, value: object) -> None:
    await call.reply([msgspec.json.encode(value)])
