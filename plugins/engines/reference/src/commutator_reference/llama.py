"""The configuration of a Llama-family model, out of a Hugging Face directory or a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from attrs import frozen

from commutator.errors import ConfigError
from commutator.tokenizer import read_gguf

MODEL_TYPES = {
    "gemma3_text": "Gemma 3",
    "gpt_oss": "gpt-oss",
    "llama4_text": "Llama 4",
    "qwen3_next": "Qwen3-Next",
    "deepseek_v2": "DeepSeek-V2",
    "mixtral": "Mixtral",
}
"""The families that ``families`` reads, by ``model_type`` of config.json."""


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

    def kv_bytes(self, tokens: int, number_bytes: int) -> int:
        """Keys and values of ``tokens`` tokens, each number of ``number_bytes`` bytes."""
        return tokens * self.num_layers * 2 * self.num_kv_heads * self.head_size * number_bytes

    @property
    def least_parameters(self) -> int:
        """The number of weights, as if input and output embedding were one."""
        attention = self.hidden_size * self.head_size * 2 * (self.num_heads + self.num_kv_heads)
        layer = attention + 3 * self.hidden_size * self.intermediate_size
        return self.vocab_size * self.hidden_size + self.num_layers * layer


def read_config(path: Path) -> LlamaConfig:
    """The configuration of the model at ``path``, a directory or a GGUF file.

    Raises ConfigError for an architecture or an option that this engine does not compute, and for
    what the file lacks.
    """
    return hf_config(path) if path.is_dir() else gguf_config(path, *read_gguf(path))


class _Said(dict[str, Any]):
    """What a file says of its model; to ask for what it lacks raises ConfigError."""

    def __init__(self, said: Mapping[str, Any], file: str, path: Path) -> None:
        super().__init__(said)
        self._file, self._path = file, path

    def __missing__(self, key: str) -> NoReturn:
        message = f"{self._file} has no '{key}', which a Llama model needs"
        raise ConfigError([message], str(self._path))


def hf_config(folder: Path) -> LlamaConfig:
    """As ``read_config``, of a Hugging Face directory."""
    raw = _Said(read_json(folder / "config.json"), "config.json", folder)
    problems = _unsupported(raw)
    if problems:
        raise ConfigError(problems, str(folder))
    heads = raw["num_attention_heads"]
    # transformers 5 writes rope_parameters; before, there was rope_scaling, or null.
    said = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope = _Said(said, "config.json", folder)
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
        rope_theta=rope.get("rope_theta", raw.get("rope_theta", 10_000.0)),
        rope_scaling=_rope_scaling(rope, folder),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        eos_token_ids=eos_token_ids(raw, folder),
    )


def _unsupported(raw: Mapping[str, Any]) -> list[str]:
    """What in a config.json this engine cannot compute, each in a sentence."""
    model_type = raw.get("model_type")
    if model_type != "llama":
        known = ", ".join(f'"{name}"' for name in MODEL_TYPES)
        return [f'model_type is "{model_type}"; the reference engine runs "llama", {known} only']
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


def _rope_scaling(rope: Mapping[str, Any], folder: Path) -> RopeScaling | None:
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


def eos_token_ids(raw: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer, by config.json and generation_config.json."""
    # Instruction-tuned models end their turns with tokens that only generation_config.json names.
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ids: list[int] = []
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ids += value if isinstance(value, list) else [] if value is None else [value]
    return tuple(dict.fromkeys(ids))


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises ConfigError."""
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError([f"cannot read {path}: {error}"]) from None
    if not isinstance(parsed, dict):
        raise ConfigError([f"{path} does not hold a JSON object"])
    return parsed


def gguf_config(path: Path, said: Mapping[str, Any], tensors: Mapping[str, object]) -> LlamaConfig:
    """As ``read_config``, of a GGUF file that ``read_gguf`` has read."""
    metadata = _Said(said, "the metadata", path)
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        message = f'the architecture is "{architecture}"; the reference engine runs "llama" only'
        raise ConfigError([message], str(path))
    heads, hidden = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    head_size = metadata.get("llama.attention.key_length", hidden // heads)
    problems = _unsupported_in_gguf(metadata, tensors, head_size)
    if problems:
        raise ConfigError(problems, str(path))
    linear = metadata.get("llama.rope.scaling.type", "none") == "linear"
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    return LlamaConfig(
        vocab_size=metadata.get("llama.vocab_size", len(metadata.get("tokenizer.ggml.tokens", ()))),
        hidden_size=hidden,
        intermediate_size=metadata["llama.feed_forward_length"],
        num_layers=metadata["llama.block_count"],
        num_heads=heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_size=head_size,
        context_length=metadata["llama.context_length"],
        norm_epsilon=metadata["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
        rope_scaling=LinearRopeScaling(metadata["llama.rope.scaling.factor"]) if linear else None,
        tied_embeddings="output.weight" not in tensors,
        eos_token_ids=tuple(dict.fromkeys(metadata[key] for key in eos_keys if key in metadata)),
    )


def _unsupported_in_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, object], head_size: int
) -> list[str]:
    """Features of the file that this engine lacks, each in a sentence."""
    problems = list[str]()
    if metadata.get("llama.expert_count", 0):
        problems.append("the model is a mixture of experts, which the reference engine cannot run")
    if metadata.get("llama.rope.dimension_count", head_size) != head_size:
        problems.append("only part of each head is rotated; the reference engine rotates all of it")
    if "rope_freqs.weight" in tensors:
        problems.append(
            'the file scales rotary frequencies by a table ("rope_freqs.weight"), which the '
            "reference engine does not read; use the model's Hugging Face directory instead"
        )
    if any(name.endswith("attn_q.bias") for name in tensors):
        problems.append("the projections have biases, which the reference engine does not add")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        problems.append(f'the rotary scaling "{scaling}" is unknown; known: "none", "linear"')
    return problems
