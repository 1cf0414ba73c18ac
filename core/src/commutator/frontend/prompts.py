"""From what the client sent to token ids, without holding up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from attrs import evolve

from commutator.errors import RequestError
from commutator.frontend.requests import ChatMessage, ChatRequest, TokenizeRequest
from commutator.frontend.retention import CacheControl
from commutator.text.model import TextModel
from commutator.text.prefix_cache import PrefixCache, PromptTokens

__all__ = ["chat_prompt", "completion_prompts", "encode_text", "marked_prefixes"]

T = TypeVar("T")

# Tokenizing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_CHARACTERS = 8_000
# Rendering does little more than copy.
_INLINE_RENDER_CHARACTERS = 100_000


async def completion_prompts(
    model: TextModel, cache: PrefixCache, items: Sequence[str | list[int]]
) -> list[PromptTokens]:
    """Each prompt, tokenized. Raises RequestError for empty prompts and unknown token ids."""
    texts = [item for item in items if isinstance(item, str)]
    encoded = iter(await _encode(cache, texts, add_special_tokens=True))
    prompts = [
        next(encoded) if isinstance(item, str) else PromptTokens(item, None, 0) for item in items
    ]
    for prompt in prompts:
        _check(model, prompt.token_ids)
    return prompts


async def encode_text(cache: PrefixCache, text: str, *, add_special_tokens: bool) -> PromptTokens:
    """The tokens of a text, which may be empty."""
    found = cache.look_up(text, add_special_tokens=add_special_tokens)
    complete = partial(cache.complete, found)
    return await _maybe_in_thread(found.missing_characters, _INLINE_CHARACTERS, complete)


async def _encode(
    cache: PrefixCache, texts: Sequence[str], *, add_special_tokens: bool
) -> list[PromptTokens]:
    found = [cache.look_up(text, add_special_tokens=add_special_tokens) for text in texts]
    missing = sum(one.missing_characters for one in found)
    return await _maybe_in_thread(
        missing, _INLINE_CHARACTERS, lambda: [cache.complete(one) for one in found]
    )


async def chat_prompt(
    model: TextModel, cache: PrefixCache, request: ChatRequest | TokenizeRequest
) -> PromptTokens:
    """The rendered conversation, tokenized. Raises RequestError."""
    special = isinstance(request, TokenizeRequest) and bool(request.add_special_tokens)
    messages = [_as_mapping(message) for message in request.messages or ()]
    characters = sum(len(message["content"]) for message in messages)
    text = await _maybe_in_thread(
        characters, _INLINE_RENDER_CHARACTERS, lambda: _render(model, messages, request)
    )
    # The template itself writes BOS and its like.
    return await encode_text(cache, text, add_special_tokens=special)


async def marked_prefixes(
    model: TextModel, cache: PrefixCache, request: ChatRequest, prompt: PromptTokens
) -> list[tuple[CacheControl, int]]:
    """The messages' marks, each with the tokens of the prompt up to the end of its message.

    That is as far as the prompt agrees with one that ends there: templates may look ahead.
    """
    marks: list[tuple[CacheControl, int]] = []
    for number, message in enumerate(request.messages, start=1):
        for mark in _marks(message):
            until = evolve(
                request,
                messages=request.messages[:number],
                add_generation_prompt=False,
                continue_final_message=False,
            )
            ending = await chat_prompt(model, cache, until)
            pairs = enumerate(zip(ending.token_ids, prompt.token_ids, strict=False))
            most = min(len(ending.token_ids), len(prompt.token_ids))
            marks.append((mark, next((n for n, (mine, its) in pairs if mine != its), most)))
    return marks


def _marks(message: ChatMessage) -> list[CacheControl]:
    given = [message.cache_control]
    if not isinstance(message.content, str):
        given += [part.cache_control for part in message.content]
    return [mark for mark in given if mark is not None]


def _render(
    model: TextModel,
    messages: Sequence[Mapping[str, str]],
    request: ChatRequest | TokenizeRequest,
) -> str:
    """The prompt's text. Raises RequestError."""
    go_on = bool(request.continue_final_message)
    if go_on and request.add_generation_prompt is not False:
        raise RequestError(
            "continue_final_message: needs add_generation_prompt to be false",
            "continue_final_message",
        )
    return model.render_chat(
        messages,
        add_generation_prompt=request.add_generation_prompt is not False,
        continue_final_message=go_on,
        variables=request.chat_template_kwargs,
    )


def _as_mapping(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(part.text for part in content)
    name = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **name}


def _check(model: TextModel, token_ids: Sequence[int]) -> None:
    if not token_ids:
        raise RequestError("prompt: expected at least one token, got an empty prompt", "prompt")
    if max(token_ids) >= model.vocab_size:
        raise RequestError(
            f"prompt: expected token ids below {model.vocab_size}, got {max(token_ids)}", "prompt"
        )


async def _maybe_in_thread(characters: int, inline_characters: int, work: Callable[[], T]) -> T:
    return work() if characters <= inline_characters else await asyncio.to_thread(work)
