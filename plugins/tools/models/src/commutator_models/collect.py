"""Writes families.json from the configuration classes of the installed transformers.

Of each configuration only what ``read_model_kv`` depends on is kept.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from commutator_engine_kit.model_kv import ModelKv, read_model_kv
from commutator_models.families import FILE

FAMILIES = {
    "Apertus": "apertus",
    "A.X K1": "axk1",
    "Bamba": "bamba",
    "Command A, Command R7B": "cohere2",
    "DeepSeek V2": "deepseek_v2",
    "DeepSeek V3, R1": "deepseek_v3",
    "DeepSeek V3.2": "deepseek_v32",
    "DeepSeek V4": "deepseek_v4",
    "ERNIE 4.5 MoE": "ernie4_5_moe",
    "EXAONE 4": "exaone4",
    "Falcon H1": "falcon_h1",
    "Falcon Mamba": "falcon_mamba",
    "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text",
    "Gemma 3n": "gemma3n_text",
    "Gemma 4": "gemma4_text",
    "GLM 4": "glm4",
    "GLM 4.5, 4.6": "glm4_moe",
    "GLM 5": "glm_moe_dsa",
    "GLM 5 Next": "glm5_next_text",
    "gpt-oss": "gpt_oss",
    "Granite 3": "granite",
    "Granite 4": "granitemoehybrid",
    "Hunyuan 3": "hy_v3",
    "Hunyuan 4": "hy_v4",
    "Jamba": "jamba",
    "Kimi K2.5": "kimi_k25",
    "Kimi Linear": "kimi_linear",
    "LFM2": "lfm2",
    "LFM3": "lfm3",
    "Ling hybrid": "bailing_hybrid",
    "Llama 2, 3": "llama",
    "Llama 3.2 Vision": "mllama",
    "Llama 4": "llama4_text",
    "LongCat Flash": "longcat_flash",
    "Mamba 2": "mamba2",
    "MiMo V2 Flash": "mimo_v2_flash",
    "MiniMax 01": "minimax",
    "MiniMax M2": "minimax_m2",
    "MiniMax M3": "minimax_m3_vl_text",
    "Ministral 3": "ministral3",
    "Mistral": "mistral",
    "Mistral 4": "mistral4",
    "Mistral Large 4": "mistral_large4_text",
    "Mixtral": "mixtral",
    "OLMo 3": "olmo3",
    "OLMo Hybrid": "olmo_hybrid",
    "Phi-3, Phi-4": "phi3",
    "Qwen2": "qwen2",
    "Qwen3": "qwen3",
    "Qwen3 MoE": "qwen3_moe",
    "Qwen3.5": "qwen3_5_text",
    "Qwen3.5 MoE": "qwen3_5_moe_text",
    "Qwen3-Next": "qwen3_next",
    "RecurrentGemma": "recurrent_gemma",
    "Seed-OSS": "seed_oss",
    "SmolLM3": "smollm3",
    "StarCoder 2": "starcoder2",
    "Step 3.7": "step3p7",
    "Whisper": "whisper",
    "Zamba 2": "zamba2",
}
"""The ``model_type`` of each family's configuration class in transformers, by title."""


_PUBLISHED: tuple[tuple[str, str, str, Mapping[str, Any]], ...] = (
    (
        "Nemotron-H 4B",
        "nemotron_h",
        "NVIDIA, Megatron Bridge, docs/models/llm/nemotronh.md",
        {
            "layers_block_type": None,
            "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
            "hidden_size": 3072,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mamba_num_heads": 112,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "max_position_embeddings": 8192,
        },
    ),
)
"""Models whose sizes are published where the class's defaults are only an example: title,
``model_type``, source, and what it says."""


def needed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a configuration without which it would be read as another model."""
    kept = dict(config)
    wanted = _read(kept)
    for name in config:
        without = {key: value for key, value in kept.items() if key != name}
        if _read(without) == wanted:
            kept = without
    return {name: kept[name] for name in sorted(kept)}


def _read(config: Mapping[str, Any]) -> ModelKv:
    return read_model_kv(config)


def collected() -> list[dict[str, Any]]:
    """An entry for each of the families, by title."""
    import transformers

    version = transformers.__version__
    entries = []
    for title, model_type in FAMILIES.items():
        name, config = _defaults(model_type)
        source = f"transformers {version}, defaults of {name}"
        entries.append({"title": title, "source": source, "config": needed(config)})
    for title, model_type, said_by, said in _PUBLISHED:
        name, config = _defaults(model_type)
        source = f"{said_by}; the rest as defaults of {name}, transformers {version}"
        entries.append({"title": title, "source": source, "config": needed({**config, **said})})
    return sorted(entries, key=lambda entry: str(entry["title"]).lower())


def _defaults(model_type: str) -> tuple[str, dict[str, Any]]:
    """The name of a configuration class, and its defaults as config.json would have them."""
    import transformers

    made: Any = transformers.CONFIG_MAPPING[model_type]()
    config = json.loads(json.dumps(made.to_dict(), default=str))
    text = config.get("text_config")
    return type(made).__name__, dict(text) if isinstance(text, dict) else config


def main() -> None:
    """Write the file beside this module, a line for each family."""
    lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in collected())
    Path(__file__).with_name(FILE).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
