"""What defines a Llama-family model: its configuration and its weights.

Projections that share their input are fused, as the forward pass needs them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import xxhash
from attrs import frozen
from torch import Tensor

from commutator.contract.block import CacheIdentity
from commutator.errors import ConfigError

__all__ = [
    "LayerWeights",
    "LinearRopeScaling",
    "Llama3RopeScaling",
    "LlamaConfig",
    "LlamaWeights",
    "RopeScaling",
    "TensorSource",
    "build_weights",
    "cache_identity",
]

_READ_BYTES = 8 << 20


@frozen
class LinearRopeScaling:
    """Every rotary frequency divided by ``factor``."""

    factor: float


@frozen
class Llama3RopeScaling:
    """Low rotary frequencies divided by ``factor``, high ones kept, a ramp between (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context_length: int


RopeScaling = LinearRopeScaling | Llama3RopeScaling


@frozen(kw_only=True)
class LlamaConfig:
    """Shapes and constants of a model; the names are the usual ones of model cards."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    context_length: int
    """Most tokens the model was made for, prompt and answer together."""
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    """Whether the output projection is the input embedding."""
    eos_token_ids: tuple[int, ...] = ()

    def __attrs_post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                [f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads"],
                "model",
            )
        if self.head_size % 2:
            raise ConfigError([f"the head size must be even, not {self.head_size}"], "model")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


TensorSource = Callable[[str], Tensor]
"""A tensor by its Hugging Face name, in Hugging Face's row order; KeyError when there is none."""


@frozen(eq=False)
class LayerWeights:
    """Weights of one layer; matrices are [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    attention_output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


@frozen(eq=False)
class LlamaWeights:
    """Every weight of a model, all of one dtype on one device."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    output: Tensor
    """The embedding itself where the two are tied."""


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
            qkv=torch.cat(qkv),
            attention_output=get(f"{attention}.o_proj.weight", hidden, query_size),
            mlp_norm=get(f"model.layers.{index}.post_attention_layernorm.weight", hidden),
            gate_up=torch.cat(gate_up),
            down=get(f"{mlp}.down_proj.weight", hidden, config.intermediate_size),
        )

    hidden = config.hidden_size
    query_size = config.num_heads * config.head_size
    kv_size = config.num_kv_heads * config.head_size
    embedding = get("model.embed_tokens.weight", config.vocab_size, hidden)
    return LlamaWeights(
        embedding=embedding,
        layers=tuple(layer(index) for index in range(config.num_layers)),
        norm=get("model.norm.weight", hidden),
        output=(
            embedding
            if config.tied_embeddings
            else get("lm_head.weight", config.vocab_size, hidden)
        ),
    )


def cache_identity(
    name: str, path: Path, config: LlamaConfig, *, block_size: int, dtype: torch.dtype
) -> CacheIdentity:
    """The identity of blocks computed from the weights at ``path``, without adapter and salt.

    Reads every byte of the weights: two fine-tunes may differ in a single tensor.
    """
    digest = _digest(path)
    return CacheIdentity(
        model=name,
        weights=digest,
        tokenizer=digest,  # the tokenizer is in the same file or directory
        dtype=str(dtype).removeprefix("torch."),
        layout=(
            f"reference-1: {config.num_layers} layers, key and value, "
            f"{config.num_kv_heads} heads, {block_size} tokens, {config.head_size}"
        ),
        block_size=block_size,
    )


def _digest(path: Path) -> str:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    state = xxhash.xxh3_128()
    for file in files:
        name = str(file.relative_to(path)) if path.is_dir() else ""
        state.update(f"{name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as opened:
            while piece := opened.read(_READ_BYTES):
                state.update(piece)
    return state.hexdigest()
