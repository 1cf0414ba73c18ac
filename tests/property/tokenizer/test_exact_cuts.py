"""Cutting and caching never change the tokens, whatever the tokenizer and the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.tokenizers import REAL, SPECIAL, encoder, lists, tokenizers_by_name

from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.tokenizer import prompt_cache
from commutator.tokenizer.cut_points import cut_points_of
from commutator.tokenizer.encoder import Encoder, FastTokenizer, TokenIds, random_texts
from commutator.tokenizer.prompt_cache import BlockHashing, PromptTokenCache

TOKENIZERS = tokenizers_by_name()
CUTS = {kind: cut_points_of(tokenizer) for kind, tokenizer in TOKENIZERS.items()}
BLOCK_SIZE = 4

# Pieces that meet in ways that tokenizers care about.
ascii_words = ["the", "of", "fox", "isn't", "they'LL", "'s", "a", "I", "im_start", "<s", "<|im_"]
signs = ["7", "2024", "...", "!?", "(", ")", "_", "|>", "<mask>", "\u2019", "\u2581", "\U0001f600"]
signs += ["<\uff5c", "\uff5c>", "</s", "<0x41>"]
others = [
    "caf\u00e9",
    "e\u0301",
    "\u0301",
    "\u0441\u043b\u043e",
    "\u4e2d\u6587",
    "\u017f",
    "\u2167",
]
others += ["\u0660", "\u00df", "\u01c5", "\u1e0b\u0323"]
words = st.sampled_from(ascii_words + signs + others)
gaps = st.sampled_from([" ", " ", " ", " ", "", "  ", "\n", "\n\n", " \n ", "\t", "\r\n", "\u00a0"])
special_tokens = st.sampled_from([*SPECIAL, *(special for _, _, special in REAL.values())])
pieces = st.tuples(words | special_tokens | st.text(max_size=3), gaps).map("".join)
texts = st.lists(pieces, max_size=30).map("".join).filter(lambda text: "\x00" not in text)
kinds = pytest.mark.parametrize("kind", TOKENIZERS)


@pytest.fixture(autouse=True, scope="module")
def short_chunks() -> Iterator[None]:
    """Chunks of a few characters, so that short texts are cut everywhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_cache, "chunk_end", lambda start: start + 1)
        patch.setattr(prompt_cache, "_LEAST_NEW_CHARACTERS", 1)
        patch.setattr(prompt_cache, "_NODE_CHUNKS", 3)
        yield


def _hashing() -> BlockHashing:
    return BlockHashing(
        BLOCK_SIZE,
        lambda ids, known, salt: sequence_hashes(ids, BLOCK_SIZE, cache_salt=salt, known=known),
    )


@kinds
@given(text=texts)
@example(text="fox of the fox of the")
@example(text="fox the<|im_end|> the<|im_start|>")
def test_the_parts_have_the_tokens_of_the_whole(kind: str, text: str) -> None:
    tokenizer, cuts = TOKENIZERS[kind], CUTS[kind]
    at = 0
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    while (cut := cuts.next_cut(text, at + 1)) is not None:
        at = cut
        left = tokenizer.encode(text[:at], add_special_tokens=False).ids
        right = tokenizer.encode(text[at:], add_special_tokens=False).ids
        assert left + right == whole, (text[:at], text[at:])


@kinds
@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 4),
            st.integers(0, 80),
            texts,
            st.booleans(),
            st.sampled_from([None, "s"]),
        ),
        max_size=8,
    ),
    max_bytes=st.sampled_from([0, 3_000, 20_000, 1 << 20]),
)
def test_a_cache_answers_like_the_tokenizer(
    kind: str, requests: list[tuple[int, int, str, bool, str | None]], max_bytes: int
) -> None:
    """Each prompt begins like an earlier one, up to any place, and goes on in its own way."""
    tokenizer = TOKENIZERS[kind]
    cache = PromptTokenCache(encoder(kind), CUTS[kind], max_bytes, hashing=_hashing())
    prompts = [""]
    for earlier, shared, ending, special, salt in requests:
        text = prompts[-1 - earlier % len(prompts)][:shared] + ending
        prompts.append(text)
        plain = tokenizer.encode(text, add_special_tokens=special).ids
        for _ in range(2):
            prompt = cache.encode(text, salt, add_special_tokens=special)
            assert list(prompt.token_ids) == plain
            assert prompt.sequence_hashes == sequence_hashes(plain, BLOCK_SIZE, cache_salt=salt)
            assert cache.size_bytes <= max_bytes


@pytest.mark.security
@kinds
@settings(max_examples=40)
@given(text=texts, most=st.integers(1, 60), max_bytes=st.sampled_from([0, 1 << 20]))
@example(text="fox \x04 of the fox\x04 of the", most=4, max_bytes=1 << 20)
def test_in_steps_a_prompt_has_the_tokens_of_the_whole(
    kind: str, text: str, most: int, max_bytes: int
) -> None:
    given: list[Sequence[str]] = []
    fast = encoder(kind)

    class Watched(Encoder):
        def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> TokenIds:
            given.append(texts)
            return fast.encode(texts, add_special_tokens=add_special_tokens)

    watched = Watched(TOKENIZERS[kind], FastTokenizer(None))
    cache = PromptTokenCache(watched, CUTS[kind], max_bytes, hashing=_hashing())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_cache, "_STEP_CHARACTERS", most)
        steps = cache.completing(cache.look_up(text, add_special_tokens=True))
        yields = 0
        while True:
            try:
                next(steps)
                yields += 1
            except StopIteration as end:
                prompt = end.value
                break
    plain = TOKENIZERS[kind].encode(text).ids
    assert list(prompt.token_ids) == plain
    assert prompt.sequence_hashes == sequence_hashes(plain, BLOCK_SIZE)
    assert all(len(step) == 1 or sum(map(len, step)) <= most for step in given)
    assert yields == len(given) - 1


def _as_tokenizers_gives(kind: str, count: int) -> None:
    """Random texts, by the fast encoder whole, and through a cache that cuts them everywhere."""
    tokenizer, fast = TOKENIZERS[kind], encoder(kind)
    was_fast = fast.is_fast
    cache = PromptTokenCache(fast, CUTS[kind], 1 << 20)
    for text in random_texts(tokenizer, count, seed=count):
        ids = tokenizer.encode(text).ids
        assert lists(fast.encode([text], add_special_tokens=True)) == [ids], text
        assert list(cache.encode(text, add_special_tokens=True).token_ids) == ids, text
    assert fast.is_fast == was_fast


@kinds
def test_random_texts_have_their_tokens(kind: str) -> None:
    _as_tokenizers_gives(kind, 500)


@pytest.mark.long
@kinds
def test_a_hundred_thousand_random_texts_have_their_tokens(kind: str) -> None:
    _as_tokenizers_gives(kind, 100_000)
