"""Prompts to tokens for one model, through its cache of tokenized prompts, off the event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from commutator.errors import RequestError
from commutator.metrics.frontend import FrontendMetrics
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.tokenizer.prompt_cache import BlockHashing, PromptTokenCache, PromptTokens
from commutator.tokenizer.text_model import TextModel

__all__ = ["Preprocessor"]

log = logging.getLogger(__name__)

T = TypeVar("T")

# Tokenizing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_CHARACTERS = 8_000
# Rendering does little more than copy.
_INLINE_RENDER_CHARACTERS = 100_000
# What a message costs to render, however short it is.
_MESSAGE_CHARACTERS = 200


class Preprocessor:
    """Renders and tokenizes one model's prompts. A long prompt is handled in a thread."""

    def __init__(
        self,
        name: str,
        model: TextModel,
        max_bytes: int,
        block_size: int | None,
        metrics: FrontendMetrics,
    ) -> None:
        """``max_bytes`` bounds the cache of tokenized prompts; 0 turns it off.

        ``block_size`` is that of the sequence hashes to make, in tokens; None for no hashes.
        """
        self._model = model
        hashing = None
        if block_size is not None:
            size = block_size

            def hashes(token_ids: Sequence[int], known: Sequence[int]) -> list[int]:
                return sequence_hashes(token_ids, size, known=known)

            hashing = BlockHashing(size, hashes)
        self._cache = cache = PromptTokenCache(
            model.tokenizer,
            max_bytes,
            hashing=hashing,
            on_hit=metrics.prompt_cache_hits.labels(name).inc,
        )
        if max_bytes and cache.cuts.problem:
            where = "only before special tokens" if cache.cuts.any else "nowhere"
            log.info(
                "model %s: its prompt cache can split prompts %s: its tokenizer: %s",
                name,
                where,
                cache.cuts.problem,
            )

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache of tokenized prompts takes."""
        return self._cache.size_bytes

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_special_tokens: bool = False,
        **options: Any,
    ) -> PromptTokens:
        """The rendered conversation, tokenized; ``options`` as for ``TextModel.render_chat``.

        The chat template itself writes BOS, hence no further special tokens by default. Raises
        RequestError when the model has no template or the template refuses the messages.
        """
        characters = sum(_MESSAGE_CHARACTERS + len(message["content"]) for message in messages)
        text = await _maybe_in_thread(
            characters,
            _INLINE_RENDER_CHARACTERS,
            lambda: self._model.render_chat(messages, **options),
        )
        return await self.encode(text, add_special_tokens=add_special_tokens)

    async def completion(self, prompts: Sequence[str | list[int]]) -> list[PromptTokens]:
        """Each prompt, tokenized. Raises RequestError for empty prompts and unknown token ids."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(await self._encode(texts, add_special_tokens=True))
        tokens = [
            next(encoded) if isinstance(prompt, str) else PromptTokens(prompt, None, 0)
            for prompt in prompts
        ]
        for one in tokens:
            self._check(one.token_ids)
        return tokens

    async def encode(self, text: str, *, add_special_tokens: bool) -> PromptTokens:
        """The tokens of a text, which may be empty."""
        (tokens,) = await self._encode([text], add_special_tokens=add_special_tokens)
        return tokens

    async def _encode(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> list[PromptTokens]:
        cache = self._cache
        found = [cache.look_up(text, add_special_tokens=add_special_tokens) for text in texts]
        missing = sum(one.missing_characters for one in found)
        return await _maybe_in_thread(
            missing, _INLINE_CHARACTERS, lambda: [cache.complete(one) for one in found]
        )

    def _check(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise RequestError("prompt: expected at least one token, got an empty prompt", "prompt")
        if max(token_ids) >= self._model.vocab_size:
            raise RequestError(
                f"prompt: expected token ids below {self._model.vocab_size}, got {max(token_ids)}",
                "prompt",
            )


async def _maybe_in_thread(characters: int, inline_characters: int, work: Callable[[], T]) -> T:
    return work() if characters <= inline_characters else await asyncio.to_thread(work)
