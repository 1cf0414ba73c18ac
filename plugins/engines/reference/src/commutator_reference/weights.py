"""The weights of a Llama-family model, out of safetensors or a GGUF file.

Projections that share their input are fused, as the forward pass needs them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from attrs import frozen
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

from commutator.contract.block import CacheIdentity
from commutator.errors import ConfigError
from commutator.tokenizer import GgufTensor
from commutator_engine_kit.model_identity import weights_digest
from commutator_reference.llama import LlamaConfig, read_json

TensorSource = Callable[[str], Tensor]
"""A tensor by its Hugging Face name, in Hugging Face's row order; KeyError when there is none."""


class Linear:
    """``x @ weight.T`` for one weight [out, in].

    On CPUs large float32 weights are stored in oneDNN's blocked order, as PyTorch's own compiler
    does: for the few rows of a decode batch it is twice as fast as the plain order.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight  # noqa: SLF001

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self._packed:
            result: Tensor = _packed_linear(x, self._weight, None, "none", [], "")
            return result
        return linear(x, self._weight)


_LEAST_PACKED = 1 << 18
"""Numbers of a weight. A call with a packed one takes 30 microseconds more, whatever its size."""


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.numel() >= _LEAST_PACKED
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed_linear(*arguments: object) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(*arguments)  # noqa: SLF001
    return result


@frozen(eq=False)
class LayerWeights:
    """Weights of one layer."""

    attention_norm: Tensor
    qkv: Linear
    attention_output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@frozen(eq=False)
class LlamaWeights:
    """Every weight of a model, all of one dtype on one device."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    output: Linear
    """Of the embedding where the two are tied."""


def build_weights(
    config: LlamaConfig, source: TensorSource, *, device: torch.device, dtype: torch.dtype
) -> LlamaWeights:
    """Read, convert and fuse every weight.

    Raises ConfigError for a tensor that is missing or of another shape than ``config`` says.
    """

    def get(name: str, *shape: int) -> Tensor:
        try:
            tensor = source(name)
        except KeyError:
            raise ConfigError([f'the tensor "{name}" is missing'], "model") from None
        if tuple(tensor.shape) != shape:
            found = f"{tuple(tensor.shape)}, the configuration says {shape}"
            raise ConfigError([f'the tensor "{name}" has the shape {found}'], "model")
        return tensor.to(device=device, dtype=dtype)

    def layer(index: int) -> LayerWeights:
        attention = f"model.layers.{index}.self_attn"
        mlp = f"model.layers.{index}.mlp"
        qkv = (
            get(f"{attention}.q_proj.weight", query_size, hidden),
            get(f"{attention}.k_proj.weight", kv_size, hidden),
            get(f"{attention}.v_proj.weight", kv_size, hidden),
        )
        gate_up = (
            get(f"{mlp}.gate_proj.weight", config.intermediate_size, hidden),
            get(f"{mlp}.up_proj.weight", config.intermediate_size, hidden),
        )
        return LayerWeights(
            attention_norm=get(f"model.layers.{index}.input_layernorm.weight", hidden),
            qkv=Linear(torch.cat(qkv)),
            attention_output=Linear(get(f"{attention}.o_proj.weight", hidden, query_size)),
            mlp_norm=get(f"model.layers.{index}.post_attention_layernorm.weight", hidden),
            gate_up=Linear(torch.cat(gate_up)),
            down=Linear(get(f"{mlp}.down_proj.weight", hidden, config.intermediate_size)),
        )

    hidden = config.hidden_size
    query_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    embedding = get("model.embed_tokens.weight", config.vocab_size, hidden)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=get("model.norm.weight", hidden),
        output=Linear(
            embedding
            if config.tied_embeddings
            else get("lm_head.weight", config.vocab_size, hidden)
        ),
    )


def hf_tensors(folder: Path) -> TensorSource:
    """The tensors of safetensors files, sharded or not. Raises ConfigError when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in read_json(index)["weight_map"].items()}
    else:
        single = folder / "model.safetensors"
        if not single.is_file():
            message = "expected model.safetensors or model.safetensors.index.json"
            raise ConfigError([message], str(folder))
        with safe_open(single, "pt") as opened:
            files = dict.fromkeys(opened.keys(), single)
    missing = sorted({str(path) for path in files.values() if not path.is_file()})
    if missing:
        raise ConfigError([f"the index names {path}, which is not there" for path in missing])

    def tensor(name: str) -> Tensor:
        with safe_open(files[name], "pt") as opened:
            found: Tensor = opened.get_tensor(name)
        return found

    return tensor


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
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


def gguf_tensors(
    path: Path, entries: Mapping[str, GgufTensor], config: LlamaConfig
) -> TensorSource:
    """The tensors of a GGUF file as float32, which raises ConfigError for what cannot be read."""
    data = np.memmap(path, np.uint8, "r")

    def tensor(name: str) -> Tensor:
        known = _gguf_name(name)
        try:
            weight = torch.from_numpy(read_gguf_tensor(data, entries[known]))
        except ValueError as error:
            raise ConfigError([f'the tensor "{known}": {error}'], str(path)) from None
        if name.endswith("q_proj.weight"):
            return _half_split(weight, config.num_heads)
        if name.endswith("k_proj.weight"):
            return _half_split(weight, config.num_kv_heads)
        return weight

    return tensor


def _gguf_name(name: str) -> str:
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_GGUF_LAYER_NAMES[rest]}"


def read_gguf_tensor(data: NDArray[np.uint8], entry: GgufTensor) -> NDArray[np.float32]:
    """A copy of a tensor in the file whose bytes are ``data``. Raises ValueError."""
    kind = GGMLQuantizationType(entry.kind)
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    *outer, inner = entry.shape
    row_bytes = inner // block_items * block_bytes
    raw = np.asarray(data[entry.offset : entry.offset + math.prod(outer) * row_bytes])
    if raw.size < math.prod(outer) * row_bytes:
        raise ValueError("the file ends before it does")
    try:
        values: NDArray[np.float32] = dequantize(raw.reshape(*outer, row_bytes), kind)
    except NotImplementedError:
        message = f"the type {kind.name} cannot be read; use another quantization"
        raise ValueError(message) from None
    return values.copy() if kind == GGMLQuantizationType.F32 else values


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order: it keeps rotary partners side by side, Hugging Face half a head apart.

    [heads * head size, in], row 2i + j of a head goes to row j * (head size / 2) + i.
    """
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def cache_identity(
    name: str, path: Path, layout: str, *, block_size: int, dtype: torch.dtype
) -> CacheIdentity:
    """The identity of blocks computed from the weights at ``path``, without adapter and salt.

    ``layout`` is the arena's. Reads every byte of the weights: two fine-tunes may differ in a
    single tensor.
    """
    digest = weights_digest(path)
    return CacheIdentity(
        model=name,
        weights=digest,
        tokenizer=digest,  # the tokenizer is in the same file or directory
        dtype=str(dtype).removeprefix("torch."),
        layout=layout,
        block_size=block_size,
    )
