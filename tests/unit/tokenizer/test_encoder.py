"""The fast encoder is used where it is right, and only there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.support.tokenizers import encoder, lists, tokenizers_by_name
from tokenizers import Tokenizer

from commutator.errors import RequestError
from commutator.tokenizer import encoder as encoder_module
from commutator.tokenizer.encoder import (
    Encoder,
    FastEncode,
    FastTokenizer,
    TokenIds,
    fastokens_encode,
    random_texts,
)

TOKENIZERS = tokenizers_by_name()
SMOLLM2 = TOKENIZERS["smollm2"]
TEXT = "It isn't 2026 yet, 是吗\uff1f <|im_start|>x<|im_end|>"


def exact(tokenizer: Tokenizer, text: str, *, special: bool = True) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=special).ids
    return ids


def by(encode: Callable[[str], list[int]]) -> Callable[[Tokenizer], FastEncode]:
    def fast(texts: Sequence[str], add_special_tokens: bool) -> TokenIds:
        return TokenIds.of([encode(text) for text in texts])

    return lambda _: fast


@pytest.mark.parametrize("kind", ["smollm2", "gpt2", "digits", "llama3", "qwen2", "o200k"])
def test_usual_tokenizers_are_fast(kind: str) -> None:
    assert encoder(kind).is_fast


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_the_tokens_are_those_of_tokenizers(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    for special in (False, True):
        found = lists(encoder(kind).encode([TEXT, "", " "], add_special_tokens=special))
        assert found == [exact(tokenizer, text, special=special) for text in (TEXT, "", " ")]


@pytest.mark.parametrize(
    ("kind", "reason"), [("unigram", "the model Unigram"), ("wordpiece", "the model WordPiece")]
)
def test_what_it_does_not_support_is_left_to_tokenizers(kind: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fastokens_encode(TOKENIZERS[kind])
    assert not encoder(kind).is_fast


def test_without_fastokens_everything_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    caplog.set_level("INFO")
    slow = Encoder(SMOLLM2, FastTokenizer.of(SMOLLM2), name="m")
    assert not slow.is_fast
    assert lists(slow.encode([TEXT], add_special_tokens=True)) == [exact(SMOLLM2, TEXT)]
    assert "model m: tokenizers tokenizes its prompts: fastokens is not installed" in caplog.text


def test_one_that_is_wrong_is_found_out_when_a_model_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    differences: list[int] = []

    def without_accents(text: str) -> list[int]:
        return exact(SMOLLM2, text.replace("\u0301", ""))

    fast = FastTokenizer.of(SMOLLM2, by(without_accents))
    slow = Encoder(SMOLLM2, fast, name="m", on_difference=lambda: differences.append(1))
    assert not slow.is_fast
    assert differences == [1]
    assert lists(slow.encode(["e\u0301"], add_special_tokens=True)) == [exact(SMOLLM2, "e\u0301")]
    assert "model m: from now on tokenizers alone" in caplog.text
    assert "random texts other tokens" in caplog.text


class Panic(BaseException):
    """As what a panic of Rust code becomes."""


@pytest.mark.parametrize(("error", "stays"), [(ValueError, True), (Panic, False)])
def test_what_it_cannot_tokenize_is_left_to_tokenizers(
    error: type[BaseException], stays: bool
) -> None:
    def encode(text: str) -> list[int]:
        if text == "fail":
            raise error("the pattern needs more stack")
        return exact(SMOLLM2, text)

    fast = Encoder(SMOLLM2, FastTokenizer.of(SMOLLM2, by(encode)))
    assert fast.is_fast
    for text in ("fail", "fail", "on"):
        assert lists(fast.encode([text], add_special_tokens=True)) == [exact(SMOLLM2, text)]
    assert fast.is_fast == stays


def test_one_text_that_is_left_to_tokenizers_does_not_take_the_others_along() -> None:
    asked: list[Sequence[str]] = []
    fast = fastokens_encode(SMOLLM2)

    def encode(texts: Sequence[str], special: bool) -> TokenIds:
        found = fast(texts, special)
        asked.append(texts)
        return found

    texts = ["one", "two \x04 three", "four"]
    both = Encoder(SMOLLM2, FastTokenizer(encode))
    expected = [exact(SMOLLM2, text) for text in texts]
    assert lists(both.encode(texts, add_special_tokens=True)) == expected
    assert asked == [["one"], ["four"]]


@pytest.mark.security
def test_no_text_is_so_long_that_it_would_hold_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = encoder("smollm2")  # made with the real limits, as others use it, too
    monkeypatch.setattr(encoder_module, "LONGEST_EXACT", 10)
    monkeypatch.setattr(encoder_module, "LONGEST_FAST", 20)
    for length, byte, accepted in [(10, "\x04", True), (11, "\x04", False), (20, "!", True)]:
        text = byte + "!" * (length - 1)
        if accepted:
            assert lists(fast.encode([text], add_special_tokens=True)) == [exact(SMOLLM2, text)]
            continue
        with pytest.raises(RequestError, match="in 11 of its characters") as refused:
            fast.encode([text], add_special_tokens=True)
        assert refused.value.code == "prompt_not_divisible"
    with pytest.raises(RequestError, match="at most 20 at a time"):
        fast.encode(["!" * 21], add_special_tokens=True)
    assert fast.is_fast


def test_a_text_that_nobody_can_read_is_no_difference() -> None:
    fast = encoder("smollm2")
    with pytest.raises((TypeError, UnicodeEncodeError)):
        fast.encode(["\ud800"], add_special_tokens=True)
    assert fast.is_fast


def test_threads_may_share_it() -> None:
    fast = encoder("smollm2")
    texts = [*random_texts(SMOLLM2, 400, seed=1)]
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda text: lists(fast.encode([text], add_special_tokens=False))[0], texts)
        )
    assert found == [exact(SMOLLM2, text, special=False) for text in texts]


def test_the_texts_that_prove_it_are_always_the_same() -> None:
    first, second, other = ([*random_texts(SMOLLM2, 50, seed=seed)] for seed in (0, 0, 1))
    assert first == second != other
    assert any(any(token in text for text in first) for token in ("<|im_start|>", "<|im_end|>"))
