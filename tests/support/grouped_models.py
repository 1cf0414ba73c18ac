"""Models with several kinds of KV, of a few thousand random weights, for tests of the engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import transformers

from commutator_reference.decoder import DecoderModel
from commutator_reference.families import load_decoder

__all__ = ["FAMILIES", "VOCABULARY", "grouped_model", "oracle"]

VOCABULARY = 211
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {"num_hidden_layers": 6, "sliding_window": 24, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 40,
            "no_rope_layer_interval": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 48,
            "floor_scale": 50,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            **_MOE,
            "num_hidden_layers": 4,
            "num_experts": 4,
            "shared_expert_intermediate_size": 24,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **_MOE,
            "num_hidden_layers": 3,
            "num_key_value_heads": 4,
            "kv_lora_rank": 24,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 2,
            "topk_group": 1,
            "topk_method": "group_limited_greedy",
        },
    ),
    "mixtral": (
        "Mixtral",
        {"num_hidden_layers": 3, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
"""The name in transformers, and options, by family."""


@cache
def _folder(family: str) -> Path:
    """A directory with the model; its weights are large enough that tokens depend on all before."""
    name, options = FAMILIES[family]
    kind = f"{name}TextConfig" if name in {"Gemma3", "Llama4"} else f"{name}Config"
    config = getattr(transformers, kind)(**{**_COMMON, **options})
    config.architectures = [f"{name}ForCausalLM"]
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, weight in sorted(model.named_parameters()):
            if parameter.endswith("A_log"):
                weight.fill_(-3.0)
            elif weight.ndim > 1 and "conv" not in parameter:
                size = 0.5 if "proj" in parameter else 0.3
                weight.copy_(torch.randn(weight.shape, generator=generator) * size)
            elif parameter.endswith(("bias", "sinks")):
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    folder = Path(mkdtemp(prefix=f"{family}-"))
    model.save_pretrained(folder)
    return folder


@cache
def oracle(family: str) -> Any:
    """The model as transformers computes it."""
    loaded: Any = transformers.AutoModelForCausalLM
    return loaded.from_pretrained(
        _folder(family), dtype=torch.float32, attn_implementation="eager"
    ).eval()


@cache
def grouped_model(family: str) -> DecoderModel:
    """The model as the reference engine computes it."""
    return load_decoder(_folder(family), device=torch.device("cpu"), dtype=torch.float32)
