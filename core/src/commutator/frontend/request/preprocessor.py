"""Prompts to tokens for one model, through its cache of tokenized prompts, off the event loop."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from tokenizers import Tokenizer

from commutator.contract.conversation import Described
from commutator.errors import RequestError
from commutator.frontend.work import WorkPool
from commutator.metrics.frontend import FrontendMetrics
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.tokenizer.control_tokens import ControlTokens, RenderedPrompt
from commutator.tokenizer.cut_points import CutPoints, cut_points_of
from commutator.tokenizer.encoder import Encoder, FastTokenizer
from commutator.tokenizer.prompt_cache import (
    BlockHashing,
    FoundPrefix,
    PromptTokenCache,
    PromptTokens,
)
from commutator.tokenizer.text_model import ChatTemplate, TextModel

log = logging.getLogger(__name__)

# Tokenizing this much takes a few milliseconds; a thread costs a fraction of one.
_INLINE_CHARACTERS = 8_000
_INLINE_TOKENS = 10_000
# Rendering does little more than copy.
_INLINE_RENDER_CHARACTERS = 100_000
# What a message costs to render, however short it is.
_MESSAGE_CHARACTERS = 200
# Templates go through tools and documents, which are such variables, and make JSON of them.
_RENDERED_PER_VARIABLE = 5
# Of the cache's memory, for prompts in which clients wrote what looks like a control token.
_GUARDED_PART = 8
# Of a prompt of this length, each known chunk is looked up in a few milliseconds.
_INLINE_LOOK_UP_CHARACTERS = 400_000


class Preprocessor:
    """Renders and tokenizes one model's prompts. A long prompt is handled in a thread.

    The thread turns to other work at least about once a second.
    """

    def __init__(
        self,
        name: str,
        model: TextModel,
        max_bytes: int,
        block_size: int | None,
        metrics: FrontendMetrics,
        work: WorkPool,
    ) -> None:
        """``max_bytes`` bounds the cache of tokenized prompts; 0 turns it off.

        ``block_size`` is that of the sequence hashes to make, in tokens; None for no hashes.
        ``work`` gets what takes long.
        """
        self._model = model
        self._work = work
        self._name = name
        self._metrics = metrics
        hashing = None
        if block_size is not None:
            size = block_size

            def hashes(
                token_ids: Sequence[int], known: Sequence[int], salt: str | None
            ) -> list[int]:
                return sequence_hashes(token_ids, size, cache_salt=salt, known=known)

            hashing = BlockHashing(size, hashes)
        self._hashing = hashing
        cuts = model.cut_points
        encoder = self._encoder(model.tokenizer, model.fast_tokenizer)
        self._guarded_bytes = max_bytes // _GUARDED_PART
        self._cache = self._new_cache(encoder, cuts, max_bytes - self._guarded_bytes)
        self._guarded_cache: PromptTokenCache | None = None
        self._lock = threading.Lock()
        if max_bytes and cuts.problem:
            where = "only before special tokens" if cuts.pattern else "nowhere"
            log.info(
                "model %s: its prompt cache can split prompts %s: its tokenizer: %s",
                name,
                where,
                cuts.problem,
            )

    def _encoder(self, tokenizer: Tokenizer, fast: FastTokenizer) -> Encoder:
        differs = self._metrics.tokenizer_differences.labels(self._name).inc
        return Encoder(tokenizer, fast, name=self._name, on_difference=differs)

    def _new_cache(self, encoder: Encoder, cuts: CutPoints, max_bytes: int) -> PromptTokenCache:
        hit = self._metrics.prompt_cache_hits.labels(self._name).inc
        return PromptTokenCache(encoder, cuts, max_bytes, hashing=self._hashing, on_hit=hit)

    @property
    def cache_bytes(self) -> int:
        """Memory that the cache of tokenized prompts takes."""
        guarded = self._guarded_cache
        return self._cache.size_bytes + (0 if guarded is None else guarded.size_bytes)

    @property
    def template(self) -> ChatTemplate | None:
        """The model's chat template; None: it has none."""
        return self._model.chat_template

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        characters: int,
        *,
        max_tokens: int | None = None,
        variables: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> RenderedPrompt:
        """The prompt for messages of ``characters``; ``options`` as for ``TextModel.chat_prompt``.

        Raises RequestError when the model has no template, the template refuses the messages, or
        the prompt is certainly longer than ``max_tokens`` tokens.
        """
        characters += _MESSAGE_CHARACTERS * len(messages)
        length = sum(len(message["content"] or "") for message in messages)
        self._check_length(length, max_tokens, "messages")
        if variables:
            written = sum(map(_variable_characters, variables.values()))
            characters += _RENDERED_PER_VARIABLE * written

        def render() -> RenderedPrompt:
            return self._model.chat_prompt(messages, variables=variables, **options)

        inline = characters <= _INLINE_RENDER_CHARACTERS
        return render() if inline else await self._work.run(render)

    async def completion(
        self,
        prompts: Sequence[str | list[int]],
        *,
        salt: str | None = None,
        max_tokens: int | None = None,
    ) -> list[PromptTokens]:
        """Each prompt, tokenized; ``salt`` as for ``encode``.

        Raises RequestError for empty prompts, unknown token ids, and a prompt that is certainly
        longer than ``max_tokens``.
        """
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        encoded = iter(
            await self._encode(texts, salt, add_special_tokens=True, max_tokens=max_tokens)
        )
        tokens = [
            next(encoded)
            if isinstance(prompt, str)
            else PromptTokens(self._packed(prompt), None, 0)
            for prompt in prompts
        ]
        if not all(one.token_ids for one in tokens):
            raise RequestError("prompt: expected at least one token, got an empty prompt", "prompt")
        return tokens

    async def encode(
        self,
        text: str | RenderedPrompt,
        *,
        add_special_tokens: bool,
        salt: str | None = None,
        max_tokens: int | None = None,
    ) -> PromptTokens:
        """The tokens of a text, which may be empty, or of a rendered conversation.

        Only prompts of the same ``salt`` help to tokenize it, so that the time it takes tells
        nothing about others, and its sequence hashes are those of the salt. A rendered
        conversation has its BOS from the chat template, hence no further special tokens.

        Raises RequestError when they are certainly more than ``max_tokens``.
        """
        cache = None
        if isinstance(text, RenderedPrompt):
            if text.controls is not None:
                cache = await self._guarded(text.controls)
            text = text.text if text.sealed is None else text.sealed
        (tokens,) = await self._encode(
            [text], salt, add_special_tokens=add_special_tokens, max_tokens=max_tokens, cache=cache
        )
        return tokens

    async def _guarded(self, controls: ControlTokens) -> PromptTokenCache:
        if self._guarded_cache is not None:
            return self._guarded_cache
        return await self._work.run(partial(self._guard, controls))

    def _guard(self, controls: ControlTokens) -> PromptTokenCache:
        """The cache of prompts for the tokenizer's double. Raises RequestError: there is none."""
        with self._lock:
            if self._guarded_cache is None:
                double, problem = controls.double
                if double is None:
                    raise RequestError(
                        "messages: they have the text of a control token, and this model's "
                        f"tokenizer cannot be made to read it as text ({problem}); leave it out, "
                        "or set `special_tokens_in_contents: tokens` in the model's `models` entry "
                        "if all clients are trusted",
                        "messages",
                        "control_token",
                    )
                encoder = self._encoder(double, FastTokenizer.of(double))
                cuts = cut_points_of(double)
                self._guarded_cache = self._new_cache(encoder, cuts, self._guarded_bytes)
            return self._guarded_cache

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids below ``vocab_size``, special tokens included."""

        def decode() -> str:
            return self._model.decode(token_ids, skip_special_tokens=False)

        inline = len(token_ids) <= _INLINE_TOKENS
        return decode() if inline else await self._work.run(decode)

    async def _encode(
        self,
        texts: Sequence[str],
        salt: str | None,
        *,
        add_special_tokens: bool,
        max_tokens: int | None,
        cache: PromptTokenCache | None = None,
    ) -> list[PromptTokens]:
        for text in texts:
            self._check_length(len(text), max_tokens, "prompt")
        cache = cache or self._cache

        def look_up() -> list[FoundPrefix]:
            return [
                cache.look_up(text, salt, add_special_tokens=add_special_tokens) for text in texts
            ]

        if sum(map(len, texts)) > _INLINE_LOOK_UP_CHARACTERS:
            found = await self._work.run(look_up)
        else:
            found = look_up()
        missing = sum(one.missing_characters for one in found)
        if missing <= _INLINE_CHARACTERS:
            return [cache.complete(one) for one in found]
        return await self._work.run_in_steps(_completing(cache, found))

    def _check_length(self, characters: int, max_tokens: int | None, param: str) -> None:
        """Refuse a text that would have too many tokens even if each were the longest there is."""
        least = characters // self._model.longest_token_bytes
        if max_tokens is not None and least > max_tokens:
            raise RequestError(
                f"this model's context is {max_tokens} tokens and a prompt of {characters} "
                f"characters has at least {least}: shorten the prompt",
                param,
                "context_length_exceeded",
            )

    def _packed(self, token_ids: list[int]) -> array[int]:
        """What a client sent as tokens."""
        size, packed = self._model.vocab_size, array("I")
        if (largest := max(token_ids, default=0)) >= size:
            raise RequestError(
                f"prompt: token id {largest} is out of vocabulary: expected ids below {size}",
                "prompt",
            )
        try:
            packed.fromlist(token_ids)
        except OverflowError as error:
            raise RequestError("prompt: expected token ids of at least 0", "prompt") from error
        return packed


def _completing(
    cache: PromptTokenCache, found: Sequence[FoundPrefix]
) -> Generator[None, None, list[PromptTokens]]:
    prompts: list[PromptTokens] = []
    for one in found:
        if prompts:
            yield
        prompts.append((yield from cache.completing(one)))
    return prompts


def _variable_characters(value: Any) -> int:
    """The length of its JSON, which tools remember."""
    if isinstance(value, list) and all(type(one) is Described for one in value):
        return sum(len(one.as_json) for one in value)
    return len(msgspec.json.encode(value))


def size_of(value: Any) -> int:
    """About as many characters as JSON of ``value`` has; it is walked through without recursion."""
    size, left = 0, [value]
    while left:
        one = left.pop()
        size += 2 + len(one) if isinstance(one, str) else 2
        if isinstance(one, dict):
            left += (*one.keys(), *one.values())
        elif isinstance(one, list | tuple):
            left += one
    return size
