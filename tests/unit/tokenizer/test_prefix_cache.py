"""What the prompt cache remembers, what it forgets, and where it may cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from bench.texts import KINDS
from tests.support.tokenizers import REAL, encoder, tokenizers_by_name
from tokenizers import Tokenizer

from commutator.tokenizer import prompt_cache
from commutator.tokenizer.cut_points import cut_points_of
from commutator.tokenizer.encoder import Encoder, FastEncode, FastTokenizer, TokenIds
from commutator.tokenizer.prompt_cache import PromptTokenCache

TOKENIZERS = tokenizers_by_name()
SMOLLM2 = TOKENIZERS["smollm2"]
DOCUMENT = "A pasted document has many words and is read again and again. " * 60


def a_cache(max_bytes: int = 1 << 20, kind: str = "smollm2", **options: Any) -> PromptTokenCache:
    return PromptTokenCache(encoder(kind), cut_points_of(TOKENIZERS[kind]), max_bytes, **options)


@pytest.mark.parametrize(
    "kind", ["smollm2", "gpt2", "digits", "llama3", "qwen2", "o200k", "deepseek v4"]
)
def test_usual_tokenizers_are_cut_between_words(kind: str) -> None:
    cuts = cut_points_of(TOKENIZERS[kind])
    assert cuts.problem is None
    assert cuts.next_cut("some words", 1) == len("some")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("normalized accent", "'f\u00f6x'"),
        ("prefix space", "space before every text"),
        ("no regex", "word pattern"),
        ("lower case", "normalizer"),
        ("sentencepiece", "normalizer"),
        ("wordpiece", "normalizer"),
    ],
)
def test_others_are_cut_before_special_tokens_only(kind: str, reason: str) -> None:
    cuts = cut_points_of(TOKENIZERS[kind])
    assert reason in (cuts.problem or "")
    assert cuts.next_cut("some words<|im_end|> and more", 1) == len("some words")


@pytest.mark.parametrize("kind", REAL)
def test_those_of_published_models_are_cut_before_their_special_tokens(kind: str) -> None:
    *_, special = REAL[kind]
    cuts = cut_points_of(TOKENIZERS[kind])
    assert cuts.next_cut(f"some words{special} and more", 5) == len("some words")
    text = f"{DOCUMENT}{special}What is it?"
    cache = a_cache(kind=kind)
    plain = TOKENIZERS[kind].encode(text).ids
    assert list(cache.encode(text, add_special_tokens=True).token_ids) == plain
    again = cache.encode(text + " And why?", add_special_tokens=True)
    assert list(again.token_ids) == TOKENIZERS[kind].encode(text + " And why?").ids
    assert again.hit_tokens > 0.8 * len(plain)


@pytest.mark.parametrize(("kind", "reason"), [("unigram", "Unigram"), ("mask", "<mask>")])
def test_what_cannot_be_proven_is_off(kind: str, reason: str) -> None:
    cuts = cut_points_of(TOKENIZERS[kind])
    assert cuts.pattern is None
    assert reason in (cuts.problem or "")


def test_special_tokens_that_others_overlap_are_no_place_to_cut() -> None:
    cuts = cut_points_of(TOKENIZERS["added words"])  # "<s" is a token beside "<s>"
    assert cuts.next_cut("..<s>", 1) is None
    assert cuts.next_cut("..<|im_end|>", 1) == 2


def test_special_tokens_read_as_text_switch_it_off() -> None:
    tokenizer = type(SMOLLM2).from_str(SMOLLM2.to_str())
    tokenizer.encode_special_tokens = True
    assert cut_points_of(tokenizer).pattern is None


def test_a_document_with_a_new_question_is_not_tokenized_again() -> None:
    hits: list[int] = []
    cache = a_cache(on_hit=hits.append)
    first = cache.encode(DOCUMENT + "What is it?", add_special_tokens=True)
    second = cache.encode(DOCUMENT + "Who reads it?", add_special_tokens=True)
    assert first.hit_tokens == 0
    assert second.hit_tokens > 0.85 * len(second.token_ids)
    assert hits == [0, second.hit_tokens]
    found = cache.look_up(DOCUMENT + "Why?", add_special_tokens=True)
    assert found.missing_characters < 500


def test_the_least_recently_used_document_goes_first() -> None:
    cache = a_cache(20_000)  # two of them
    documents = [f"Number {number}. {DOCUMENT}" for number in "abc"]
    for document in (documents[0], documents[1], documents[0], documents[2]):
        cache.encode(document, add_special_tokens=True)
    known = [
        cache.look_up(document, add_special_tokens=True).known_characters for document in documents
    ]
    assert known[0] > 3_000
    assert known[2] > 3_000
    assert known[1] < known[0]
    assert cache.size_bytes <= 20_000


def test_threads_may_share_it() -> None:
    cache = a_cache(20_000)
    texts = [f"{DOCUMENT[: 400 * (n % 9)]} {n % 5} {DOCUMENT}" for n in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: cache.encode(text, add_special_tokens=True), texts))
    for text, prompt in zip(texts, found, strict=True):
        assert list(prompt.token_ids) == SMOLLM2.encode(text).ids
    assert 0 < cache.size_bytes <= 20_000


def test_of_two_equal_prompts_at_the_same_time_one_is_kept() -> None:
    cache = a_cache()
    first, second = (cache.look_up(DOCUMENT, add_special_tokens=True) for _ in range(2))
    tokens = [list(cache.complete(first).token_ids)]
    size_bytes = cache.size_bytes
    tokens.append(list(cache.complete(second).token_ids))
    assert tokens == [SMOLLM2.encode(DOCUMENT).ids] * 2
    assert cache.size_bytes == size_bytes > 0


def test_what_was_dropped_after_it_was_found_is_kept_anew() -> None:
    cache = a_cache(10_000)  # one document
    cache.encode(DOCUMENT, add_special_tokens=True)
    found = cache.look_up(DOCUMENT, add_special_tokens=True)
    cache.encode(DOCUMENT.upper(), add_special_tokens=True)
    assert cache.look_up(DOCUMENT, add_special_tokens=True).known_characters == 0
    assert list(cache.complete(found).token_ids) == SMOLLM2.encode(DOCUMENT).ids
    assert cache.look_up(DOCUMENT, add_special_tokens=True).known_characters > 3_000
    assert cache.size_bytes <= 10_000


def test_a_short_end_is_kept_once_the_conversation_has_gone_on() -> None:
    cache = a_cache()
    cache.encode(DOCUMENT, add_special_tokens=True)
    kept_bytes, known = cache.size_bytes, []
    for turns in (1, 2, 3, 4):
        text = DOCUMENT + "And what does it say about that? " * 10 * turns
        known.append(cache.look_up(text, add_special_tokens=True).known_characters)
        cache.encode(text, add_special_tokens=True)
        if turns == 1:
            assert cache.size_bytes == kept_bytes
    assert known[0] == known[1] < len(DOCUMENT)
    assert known[3] > len(DOCUMENT) + 300


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_beginning_is_found_in_any_text(kind: str) -> None:
    chance = random.Random(kind)
    begin, *ends = (KINDS[kind](chance) for _ in range(3))
    cache = a_cache()
    cache.encode(begin + ends[0][:400], add_special_tokens=True)
    again = cache.encode(begin + ends[1][:400], add_special_tokens=True)
    assert list(again.token_ids) == SMOLLM2.encode(begin + ends[1][:400]).ids
    found = cache.look_up(begin, add_special_tokens=True)
    assert found.known_characters > 0.85 * len(begin)
    assert again.hit_tokens > 0.85 * len(SMOLLM2.encode(begin).ids)


def _lying_about(word: str) -> Callable[[Tokenizer], FastEncode]:
    """A fast encoder that is wrong, but only about texts with this word."""

    def made(tokenizer: Tokenizer) -> FastEncode:
        def encode(texts: Sequence[str], special: bool) -> TokenIds:
            encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=special)
            pairs = zip(texts, encodings, strict=True)
            return TokenIds.of([[0] if word in text else one.ids for text, one in pairs])

        return encode

    return made


def test_a_sample_that_differs_ends_fast_tokenization(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(prompt_cache, "_CHECK_EVERY", 3)
    differences: list[int] = []
    fast = FastTokenizer.of(SMOLLM2, _lying_about("xyzzy"))
    liar = Encoder(SMOLLM2, fast, name="m", on_difference=lambda: differences.append(1))
    cache = PromptTokenCache(liar, cut_points_of(SMOLLM2), 1 << 20)
    prompts = [f"{DOCUMENT} xyzzy {number}" for number in range(4)]
    found = [cache.encode(prompt, add_special_tokens=True) for prompt in prompts]
    exact = [SMOLLM2.encode(prompt).ids for prompt in prompts]
    right = [list(one.token_ids) == its for one, its in zip(found, exact, strict=True)]
    assert right == [False, False, True, True]  # the third is the sample
    assert not liar.is_fast
    assert cache.size_bytes == 0
    assert differences == [1]
    assert "model m" in caplog.text
    assert "xyzzy" not in caplog.text  # what clients write is not logged


def test_a_sample_is_tokenized_whole_where_it_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = a_cache()
    cache.encode(DOCUMENT, add_special_tokens=True)
    monkeypatch.setattr(prompt_cache, "_CHECK_EVERY", 1)
    found = cache.look_up(DOCUMENT, add_special_tokens=True)
    assert found.known_characters > 3_000
    assert found.missing_characters == len(DOCUMENT)
    assert list(cache.complete(found).token_ids) == SMOLLM2.encode(DOCUMENT).ids


@pytest.mark.security
def test_long_prompts_are_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_cache, "_CHECK_EVERY", 1)
    monkeypatch.setattr(prompt_cache, "_STEP_CHARACTERS", 100)
    cache = a_cache()
    samples = [cache.look_up("a" * size, add_special_tokens=True).is_sample for size in (100, 101)]
    assert samples == [True, False]
