"""A small Llama model of random weights, in a Hugging Face directory."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

__all__ = ["make_model"]

_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 256, 512, 4, 8, 4, 32
_SEED = 11


def make_model(folder: Path) -> None:
    """Write config.json, model.safetensors and a tokenizer with a token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(alphabet),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_weights(len(alphabet)), folder / "model.safetensors", {"format": "pt"})


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        # Large enough that the next token depends on all before it.
        drawn: torch.Tensor = torch.randn((rows, columns), generator=generator)
        return drawn * (2 / math.sqrt(columns))

    weights = {
        "model.embed_tokens.weight": matrix(vocab_size, _HIDDEN),
        "lm_head.weight": matrix(vocab_size, _HIDDEN),
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": matrix(_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(_KV_HEADS * _HEAD, _HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN, _HEADS * _HEAD),
            f"{prefix}.mlp.gate_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(_INNER, _HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN, _INNER),
        }
    return weights
