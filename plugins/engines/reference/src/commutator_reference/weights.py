"""A model's weights in the form the forward pass wants: projections that share input are fused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import frozen
from torch import Tensor

from commutator.errors import ConfigError
from commutator_reference.llama_config import LlamaConfig

__all__ = ["LayerWeights", "LlamaWeights", "TensorSource", "build_weights"]

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
