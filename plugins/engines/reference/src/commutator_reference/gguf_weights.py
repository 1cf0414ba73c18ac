"""Reads a Llama model from a GGUF file: configuration, and tensors by Hugging Face names."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from torch import Tensor

from commutator.errors import ConfigError
from commutator_reference.weights import (
    LinearRopeScaling,
    LlamaConfig,
    RopeScaling,
    TensorSource,
)

__all__ = ["GgufFile", "TensorEntry", "open_gguf"]

_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# Value type number -> struct code.
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_LONG_ARRAY = 1024
"""Arrays longer than this (vocabularies) are stored as their length only."""


@frozen
class TensorEntry:
    """One tensor as the file stores it."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    """Bytes from the beginning of the file."""


class GgufFile:
    """A GGUF file opened for reading. Raises ConfigError when it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            header = _Header(self._data)
            self.metadata: Mapping[str, Any] = header.metadata
            """Scalars, strings and short arrays; a long array as ``range(length)``."""
            self.tensors: Mapping[str, TensorEntry] = header.tensors
        except (OSError, struct.error, ValueError, KeyError) as error:
            raise ConfigError([f"not a readable GGUF file: {error}"], str(path)) from error

    def need(self, key: str) -> Any:
        """The metadata ``key``. Raises ConfigError when it is missing."""
        if (value := self.metadata.get(key)) is None:
            raise ConfigError([f'the metadata "{key}" is missing'], str(self.path))
        return value

    def tensor(self, name: str) -> Tensor:
        """A float32 copy of the tensor.

        Raises KeyError when there is none, ConfigError when it cannot be read.
        """
        entry = self.tensors[name]
        block_items, block_bytes = GGML_QUANT_SIZES[entry.kind]
        *outer, inner = entry.shape
        row_bytes = inner // block_items * block_bytes
        size_bytes = math.prod(outer) * row_bytes
        if entry.offset + size_bytes > len(self._data):
            raise ConfigError([f'the file ends before the tensor "{name}" does'], str(self.path))
        raw = np.frombuffer(self._data, np.uint8, size_bytes, entry.offset)
        if entry.kind == GGMLQuantizationType.F32:
            values = raw.view(np.float32).reshape(entry.shape)
        elif entry.kind == GGMLQuantizationType.F16:
            values = raw.view(np.float16).reshape(entry.shape).astype(np.float32)
        else:
            values = self._dequantized(raw.reshape(*outer, row_bytes), entry.kind)
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    def _dequantized(
        self, rows: np.ndarray[Any, Any], kind: GGMLQuantizationType
    ) -> np.ndarray[Any, Any]:
        try:
            values: np.ndarray[Any, Any] = dequantize(rows, kind)
        except NotImplementedError:
            message = f"tensors of the type {kind.name} cannot be read; use another quantization"
            raise ConfigError([message], str(self.path)) from None
        return values


class _Header:
    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 4
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}; little-endian 2 and 3 are supported")
        tensor_count, pair_count = self._scalar("Q"), self._scalar("Q")
        self.metadata = {self._string(): self._value() for _ in range(pair_count)}
        entries = [self._tensor() for _ in range(tensor_count)]
        alignment = self.metadata.get("general.alignment", 32)
        base = -(-self._at // alignment) * alignment
        self.tensors = {
            name: TensorEntry(shape, kind, base + offset) for name, shape, kind, offset in entries
        }

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        sizes = [self._scalar("Q") for _ in range(self._scalar("I"))]
        kind = GGMLQuantizationType(self._scalar("I"))
        return name, tuple(reversed(sizes)), kind, self._scalar("Q")

    def _value(self) -> Any:
        kind = self._scalar("I")
        if kind != _ARRAY:
            return self._item(kind)
        kind, count = self._scalar("I"), self._scalar("Q")
        if count <= _LONG_ARRAY:
            return [self._item(kind) for _ in range(count)]
        if kind != _STRING:
            self._at += count * struct.calcsize(_SCALARS[kind])
        else:
            for _ in range(count):
                length = self._scalar("Q")
                self._at += length
        return range(count)

    def _item(self, kind: int) -> Any:
        return self._string() if kind == _STRING else self._scalar(_SCALARS[kind])

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        raw = self._data[self._at : self._at + length]
        self._at += length
        return raw.decode("utf-8")


_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def open_gguf(path: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration and the tensors of the model in the file.

    Raises ConfigError for an architecture or an option that this engine does not compute.
    """
    file = GgufFile(path)
    config = _config(file)

    def tensor(name: str) -> Tensor:
        weight = file.tensor(_gguf_name(name))
        if name.endswith("q_proj.weight"):
            return _half_split(weight, config.num_heads)
        if name.endswith("k_proj.weight"):
            return _half_split(weight, config.num_kv_heads)
        return weight

    return config, tensor


def _config(file: GgufFile) -> LlamaConfig:
    metadata = file.metadata
    architecture = file.need("general.architecture")
    if architecture != "llama":
        message = f'the architecture is "{architecture}"; the reference engine runs "llama" only'
        raise ConfigError([message], str(file.path))
    heads = file.need("llama.attention.head_count")
    hidden = file.need("llama.embedding_length")
    head_size = metadata.get("llama.attention.key_length", hidden // heads)
    problems = _unsupported(file, head_size)
    if problems:
        raise ConfigError(problems, str(file.path))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_ids = [metadata.get(key) for key in eos_keys]
    return LlamaConfig(
        vocab_size=metadata.get("llama.vocab_size", len(tokens)),
        hidden_size=hidden,
        intermediate_size=file.need("llama.feed_forward_length"),
        num_layers=file.need("llama.block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_size=head_size,
        context_length=file.need("llama.context_length"),
        norm_epsilon=file.need("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(file),
        tied_embeddings="output.weight" not in file.tensors,
        eos_token_ids=tuple(dict.fromkeys(token for token in eos_ids if token is not None)),
    )


def _unsupported(file: GgufFile, head_size: int) -> list[str]:
    """Features of the file that this engine lacks, each in a sentence."""
    metadata, problems = file.metadata, list[str]()
    if metadata.get("llama.expert_count", 0):
        problems.append("the model is a mixture of experts, which the reference engine cannot run")
    if metadata.get("llama.rope.dimension_count", head_size) != head_size:
        problems.append("only part of each head is rotated; the reference engine rotates all of it")
    if "rope_freqs.weight" in file.tensors:
        problems.append(
            'the file scales rotary frequencies by a table ("rope_freqs.weight"), which the '
            "reference engine does not read; use the model's Hugging Face directory instead"
        )
    if any(name.endswith("attn_q.bias") for name in file.tensors):
        problems.append("the projections have biases, which the reference engine does not add")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        problems.append(f'the rotary scaling "{scaling}" is unknown; known: "none", "linear"')
    return problems


def _rope_scaling(file: GgufFile) -> RopeScaling | None:
    if file.metadata.get("llama.rope.scaling.type", "none") == "none":
        return None
    return LinearRopeScaling(file.need("llama.rope.scaling.factor"))


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}"


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order: it keeps rotary partners side by side, Hugging Face half a head apart.

    [heads * head size, in], row 2i + j of a head goes to row j * (head size / 2) + i.
    """
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
