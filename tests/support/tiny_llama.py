"""A Llama model of a few thousand random weights, for tests of the engine around it."""

from __future__ import annotations

import torch

from commutator_reference.llama import LlamaConfig
from commutator_reference.model import LlamaModel
from commutator_reference.weights import build_weights

TINY = LlamaConfig(
    vocab_size=97,
    hidden_size=24,
    intermediate_size=40,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_size=8,
    context_length=512,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
    eos_token_ids=(2,),
)


def tiny_model(
    config: LlamaConfig = TINY, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> LlamaModel:
    """Weights large enough that the next token depends on every token before it."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed_tokens": (config.vocab_size, config.hidden_size),
        "lm_head": (config.vocab_size, config.hidden_size),
        "q_proj": (config.num_heads * config.head_size, config.hidden_size),
        "k_proj": (config.num_kv_heads * config.head_size, config.hidden_size),
        "v_proj": (config.num_kv_heads * config.head_size, config.hidden_size),
        "o_proj": (config.hidden_size, config.num_heads * config.head_size),
        "gate_proj": (config.intermediate_size, config.hidden_size),
        "up_proj": (config.intermediate_size, config.hidden_size),
        "down_proj": (config.hidden_size, config.intermediate_size),
    }

    def source(name: str) -> torch.Tensor:
        shape = shapes.get(name.split(".")[-2], (config.hidden_size,))
        return torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 1.0)

    device = torch.device("cpu")
    return LlamaModel(config, build_weights(config, source, device=device, dtype=dtype))
