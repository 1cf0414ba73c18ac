"""From what the client sent to token ids, without holding up other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from commutator.errors import RequestError
from commutator.frontend.requests import ChatMessage, ChatRequest, TokenizeRequest
from commutator.text.model import TextModel

__all__ = ["chat_prompt", "completion_prompts", "encode_text"]

T = TypeVar("T")

# Tokenizing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_CHARACTERS = 8_000


async def completion_prompts(
    model: TextModel, items: Sequence[str | list[int]]
) -> list[Sequence[int]]:
    """Token ids of each prompt. Raises RequestError for empty prompts and unknown token ids."""
    characters = sum(len(item) for item in items if isinstance(item, str))
    return await _maybe_in_thread(characters, lambda: [_token_ids(model, item) for item in items])


async def encode_text(model: TextModel, text: str, *, add_special_tokens: bool) -> list[int]:
    """Token ids of a text, which may be empty."""
    return await _maybe_in_thread(
        len(text), lambda: model.encode(text, add_special_tokens=add_special_tokens)
    )


async def chat_prompt(model: TextModel, request: ChatRequest | TokenizeRequest) -> list[int]:
    """Token ids of the rendered conversation. Raises RequestError."""
    special = isinstance(request, TokenizeRequest) and bool(request.add_special_tokens)
    messages = [_as_mapping(message) for message in request.messages or ()]
    characters = sum(len(message["content"]) for message in messages)

    def render_and_encode() -> list[int]:
        # The template itself writes BOS and its like.
        return model.encode(_render(model, messages, request), add_special_tokens=special)

    return await _maybe_in_thread(characters, render_and_encode)


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


def _token_ids(model: TextModel, prompt: str | list[int]) -> Sequence[int]:
    token_ids = model.encode(prompt) if isinstance(prompt, str) else prompt
    if not token_ids:
        raise RequestError("prompt: expected at least one token, got an empty prompt", "prompt")
    if max(token_ids) >= model.vocab_size:
        raise RequestError(
            f"prompt: expected token ids below {model.vocab_size}, got {max(token_ids)}", "prompt"
        )
    return token_ids


async def _maybe_in_thread(characters: int, work: Callable[[], T]) -> T:
    return work() if characters <= _INLINE_CHARACTERS else await asyncio.to_thread(work)
