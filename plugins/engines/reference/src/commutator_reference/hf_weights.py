"""Reads a Hugging Face model directory: config.json and safetensors, sharded or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from commutator.errors import ConfigError
from commutator_reference.weights import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LlamaConfig,
    RopeScaling,
    TensorSource,
)

__all__ = ["open_hf"]


def open_hf(folder: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration and the tensors of the model in ``folder``.

    Raises ConfigError for an architecture or an option that this engine does not compute.
    """
    try:
        config = _config(folder)
    except KeyError as error:
        message = f"config.json has no {error}, which a Llama model needs"
        raise ConfigError([message], str(folder)) from None
    return config, _tensors(folder)


def _config(folder: Path) -> LlamaConfig:
    raw = _read_json(folder / "config.json")
    problems = _unsupported(raw)
    if problems:
        raise ConfigError(problems, str(folder))
    heads = raw["num_attention_heads"]
    return LlamaConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
        context_length=raw["max_position_embeddings"],
        norm_epsilon=raw["rms_norm_eps"],
        rope_theta=_rope(raw).get("rope_theta", raw.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(_rope(raw), folder),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        eos_token_ids=_eos_token_ids(raw, folder),
    )


def _unsupported(raw: dict[str, Any]) -> list[str]:
    """What in a config.json this engine cannot compute, each in a sentence."""
    model_type = raw.get("model_type")
    if model_type != "llama":
        return [f'model_type is "{model_type}"; the reference engine runs "llama" only']
    wanted = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "quantization_config": None,
    }
    found = {name: raw.get(name, right) for name, right in wanted.items()}
    return [
        f"{name} is {found[name]!r}; the reference engine supports {right!r} only"
        for name, right in wanted.items()
        if found[name] != right
    ]


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes rope_parameters; before, there was rope_scaling, or null.
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _rope_scaling(rope: dict[str, Any], folder: Path) -> RopeScaling | None:
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return None
        case "linear":
            return LinearRopeScaling(rope["factor"])
        case "llama3":
            return Llama3RopeScaling(
                factor=rope["factor"],
                low_frequency_factor=rope["low_freq_factor"],
                high_frequency_factor=rope["high_freq_factor"],
                original_context_length=rope["original_max_position_embeddings"],
            )
        case other:
            known = 'the reference engine knows "default", "linear" and "llama3"'
            raise ConfigError([f'the rotary scaling "{other}" is unknown; {known}'], str(folder))


def _eos_token_ids(raw: dict[str, Any], folder: Path) -> tuple[int, ...]:
    # Instruction-tuned models end their turns with tokens that only generation_config.json names.
    path = folder / "generation_config.json"
    generation = _read_json(path) if path.is_file() else {}
    ids: list[int] = []
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def _tensors(folder: Path) -> TensorSource:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {name: folder / file for name, file in _read_json(index)["weight_map"].items()}
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot read {path}: {error}"]) from None
    if not isinstance(parsed, dict):
        raise ConfigError([f"{path} does not hold a JSON object"])
    return parsed
