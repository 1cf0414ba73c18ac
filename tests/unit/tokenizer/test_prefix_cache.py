"""What the prompt cache remembers, what it forgets, and where it may cut."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.tokenizers import REAL, tokenizers_by_name

from commutator.tokenizer.prompt_cache import PromptTokenCache, cut_points_of

TOKENIZERS = tokenizers_by_name()
SMOLLM2 = TOKENIZERS["smollm2"]
DOCUMENT = "A pasted document has many words and is read again and again. " * 60


@pytest.mark.parametrize(
    "kind", ["smollm2", "gpt2", "digits", "llama3", "qwen2", "o200k", "deepseek v4"]
)
def test_usual_tokenizers_are_cut_between_words(kind: str) -> None:
    assert cut_points_of(TOKENIZERS[kind]).before_spaces


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("added phrase", "'of the'"),
        ("prefix space", "space before every text"),
        ("no regex", "word pattern"),
        ("lower case", "normalizer"),
        ("sentencepiece", "normalizer"),
        ("wordpiece", "normalizer"),
    ],
)
def test_others_are_cut_before_special_tokens_only(kind: str, reason: str) -> None:
    cuts = cut_points_of(TOKENIZERS[kind])
    assert cuts.any
    assert not cuts.before_spaces
    assert reason in (cuts.problem or "")
    assert cuts.next_cut("some words<|im_end|> and more", 1) == len("some words")


@pytest.mark.parametrize("kind", REAL)
def test_those_of_published_models_are_cut_before_their_special_tokens(kind: str) -> None:
    *_, special = REAL[kind]
    cuts = cut_points_of(TOKENIZERS[kind])
    assert cuts.next_cut(f"some words{special} and more", 5) == len("some words")
    text = f"{DOCUMENT}{special}What is it?"
    cache = PromptTokenCache(TOKENIZERS[kind], 1 << 20)
    plain = TOKENIZERS[kind].encode(text).ids
    assert cache.encode(text, add_special_tokens=True).token_ids == plain
    again = cache.encode(text + " And why?", add_special_tokens=True)
    assert again.token_ids == TOKENIZERS[kind].encode(text + " And why?").ids
    assert again.hit_tokens > 0.8 * len(plain)


@pytest.mark.parametrize(("kind", "reason"), [("unigram", "Unigram"), ("mask", "<mask>")])
def test_what_cannot_be_proven_is_off(kind: str, reason: str) -> None:
    cuts = cut_points_of(TOKENIZERS[kind])
    assert not cuts.any
    assert reason in (cuts.problem or "")


def test_special_tokens_that_others_overlap_are_no_place_to_cut() -> None:
    cuts = cut_points_of(TOKENIZERS["added words"])  # "<s" is a token beside "<s>"
    assert cuts.next_cut("1.<s>", 1) is None
    assert cuts.next_cut("1.<|im_end|>", 1) == 2


def test_special_tokens_read_as_text_switch_it_off() -> None:
    tokenizer = type(SMOLLM2).from_str(SMOLLM2.to_str())
    tokenizer.encode_special_tokens = True
    assert not cut_points_of(tokenizer).any


def test_a_document_with_a_new_question_is_not_tokenized_again() -> None:
    hits: list[int] = []
    cache = PromptTokenCache(SMOLLM2, 1 << 20, on_hit=hits.append)
    first = cache.encode(DOCUMENT + "What is it?", add_special_tokens=True)
    second = cache.encode(DOCUMENT + "Who reads it?", add_special_tokens=True)
    assert first.hit_tokens == 0
    assert second.hit_tokens > 0.85 * len(second.token_ids)
    assert hits == [0, second.hit_tokens]
    found = cache.look_up(DOCUMENT + "Why?", add_special_tokens=True)
    assert found.missing_characters < 500


def test_the_least_recently_used_document_goes_first() -> None:
    cache = PromptTokenCache(SMOLLM2, 120_000)
    documents = [f"Number {number}. {DOCUMENT}" for number in "abc"]
    for document in (documents[0], documents[1], documents[0], documents[2]):
        cache.encode(document, add_special_tokens=True)
    known = [
        cache.look_up(document, add_special_tokens=True).known_characters for document in documents
    ]
    assert known[0] > 3_000
    assert known[2] > 3_000
    assert known[1] < known[0]
    assert cache.size_bytes <= 120_000


def test_threads_may_share_it() -> None:
    cache = PromptTokenCache(SMOLLM2, 20_000)
    texts = [f"{DOCUMENT[: 400 * (n % 9)]} {n % 5} {DOCUMENT}" for n in range(60)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: cache.encode(text, add_special_tokens=True), texts))
    for text, prompt in zip(texts, found, strict=True):
        assert prompt.token_ids == SMOLLM2.encode(text).ids
    assert 0 < cache.size_bytes <= 20_000


def test_words_that_are_known_are_not_tokenized_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PromptTokenCache(SMOLLM2, 1 << 20)
    cache.encode("the question of the day<|im_end|>", add_special_tokens=False)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr("commutator.tokenizer.cut_points.WordTokens._learn", refuse)
    text = "the day of the question<|im_end|>"
    again = cache.encode(text, add_special_tokens=False)
    assert SMOLLM2.decode(again.token_ids, skip_special_tokens=False) == text
