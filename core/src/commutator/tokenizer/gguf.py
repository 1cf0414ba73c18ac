"""Loads a model's text side from a GGUF file."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from commutator.errors import ConfigError
from commutator.tokenizer.cut_points import llama_words
from commutator.tokenizer.text_model import TextModel

# End of text, of a turn, of a message: each ends an answer.
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_gguf(path: Path) -> TextModel:
    """Raises ConfigError when the file is damaged or its tokenizer is of a kind not supported."""
    metadata = read_gguf_metadata(path)
    try:
        tokens = metadata["tokenizer.ggml.tokens"]
        max_model_len = metadata[f"{metadata['general.architecture']}.context_length"]
        tokenizer = tokenizer_from_gguf(metadata)
    except KeyError as error:
        raise ConfigError([f"the metadata lacks {error}"], str(path)) from error
    ids = {key: metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS}
    named = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return TextModel(
        tokenizer,
        max_model_len=max_model_len,
        eos_ids=frozenset(token_id for token_id in ids.values() if token_id is not None),
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        chat_template=metadata.get("tokenizer.chat_template"),
        special_tokens={
            name: tokens[token_id] for name, token_id in named.items() if token_id is not None
        },
    )


_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9

# value type number -> struct code
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")


@frozen
class GgufTensor:
    """One tensor as the file stores it."""

    shape: tuple[int, ...]
    """Rows first."""
    kind: int
    """The number of its type in GGML."""
    offset: int
    """Bytes from the beginning of the file."""


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """Every metadata pair of the file; arrays come as lists. Raises ConfigError when damaged."""
    return read_gguf(path)[0]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """As ``read_gguf_metadata``, and where the tensors are, by name."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Walk(data).header()
    except (struct.error, ValueError, KeyError, IndexError) as error:
        problem = f"not a readable GGUF file: {error}; was it downloaded to the end?"
        raise ConfigError([problem], str(path)) from error


class _Walk:
    """A position in the header, and how to read each kind of value from there."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0

    def header(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if self._data[:4] != _MAGIC:
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} (little-endian 2 and 3 are supported)")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        pairs = {self._string(): self._value(self._scalar("I")) for _ in range(pair_count)}
        tensors = {self._string(): self._tensor() for _ in range(tensor_count)}
        alignment = pairs.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        return pairs, {
            name: evolve(tensor, offset=base + tensor.offset) for name, tensor in tensors.items()
        }

    def _tensor(self) -> GgufTensor:
        sizes = [self._scalar("Q") for _ in range(self._scalar("I"))]
        return GgufTensor(tuple(reversed(sizes)), self._scalar("I"), self._scalar("Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._scalar(_SCALARS[kind])
        item_kind, count = self._scalar("I"), self._scalar("Q")
        if item_kind == _STRING:
            return self._strings(count)
        if item_kind == _ARRAY:
            return [self._value(_ARRAY) for _ in range(count)]
        layout = struct.Struct(f"<{count}{_SCALARS[item_kind]}")
        values = list(layout.unpack_from(self._data, self._at))
        self._at += layout.size
        return values

    def _scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        data, at, length_of = self._data, self._at, _U64.unpack_from
        values = []
        for _ in range(count):
            start = at + 8
            at = start + length_of(data, at)[0]
            values.append(str(data[start:at], "utf-8"))
        self._at = at
        return values


_CONTROL, _USER_DEFINED = 3, 4
_SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(llama_words(digits)), behavior="isolated")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, plain])


@frozen
class _Style:
    """How one family of byte-level models prepares text."""

    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_GPT2 = _Style(_byte_level)
_DIGITS = _Style(_single_digits)
_LLAMA3 = _Style(lambda: _words(r"\p{N}{1,3}"), ignore_merges=True, add_bos=True)
_QWEN2 = _Style(lambda: _words(r"\p{N}"), nfc=True)

_STYLES: Mapping[str, _Style] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes. Raises ConfigError for a kind not known here."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level_tokenizer(metadata)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece_tokenizer(metadata), True
    else:
        raise ConfigError(
            [f'tokenizer.ggml.model is "{kind}"; supported: "gpt2", "llama". {_ADVICE}'],
            "GGUF tokenizer",
        )
    _add_special_tokens(tokenizer, metadata)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", add_bos) and bos_id is not None:
        bos = metadata["tokenizer.ggml.tokens"][bos_id]
        tokenizer.post_processor = TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
        )
    return tokenizer


_ADVICE = "Use the model's Hugging Face directory, which has tokenizer.json, instead"


def _byte_level_tokenizer(metadata: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "gpt-2")
    style = _STYLES.get(name)
    if style is None:
        raise ConfigError(
            [f'tokenizer.ggml.pre is "{name}"; supported: {", ".join(_STYLES)}. {_ADVICE}'],
            "GGUF tokenizer",
        )
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=style.ignore_merges))
    tokenizer.pre_tokenizer = style.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    if style.nfc:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, style.add_bos


def _sentencepiece_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _merges_by_score(vocabulary, metadata["tokenizer.ggml.scores"])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    space_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE_MARK)] * space_prefix + [normalizers.Replace(" ", _SPACE_MARK)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * space_prefix
    )
    return tokenizer


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merge order that corresponds to the scores, by which SentencePiece merges pairs."""
    merges = []
    for piece, piece_id in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                merges.append((-scores[piece_id], vocabulary[left], vocabulary[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _add_special_tokens(tokenizer: Tokenizer, metadata: Mapping[str, Any]) -> None:
    types = metadata.get("tokenizer.ggml.token_type", ())
    tokens = metadata["tokenizer.ggml.tokens"]
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                AddedToken(token, special=special, normalized=False)
                for token, its_kind in zip(tokens, types, strict=False)
                if its_kind == kind
            ]
        )
