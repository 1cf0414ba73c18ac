"""A Llama model out of a GGUF file: its configuration, and its tensors by Hugging Face's names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from commutator.errors import ConfigError
from commutator_reference.gguf_file import GgufFile
from commutator_reference.llama_config import LinearRopeScaling, LlamaConfig, RopeScaling
from commutator_reference.weights import TensorSource

__all__ = ["open_gguf"]

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES = {
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


def open_gguf(path: Path) -> tuple[LlamaConfig, TensorSource]:
    """The configuration and the tensors of the model in the file.

    Raises ConfigError for an architecture or an option that this engine does not compute.
    """
    file = GgufFile(path)
    config = _config(_Metadata(file, path), set(file.tensors))

    def tensor(name: str) -> Tensor:
        weight = file.tensor(_gguf_name(name))
        if name.endswith("q_proj.weight"):
            return _half_split(weight, config.num_heads)
        if name.endswith("k_proj.weight"):
            return _half_split(weight, config.num_kv_heads)
        return weight

    return config, tensor


class _Metadata:
    def __init__(self, file: GgufFile, path: Path) -> None:
        self._values = file.metadata
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ConfigError([f'the metadata "{key}" is missing'], str(self.path))
        return value


def _config(metadata: _Metadata, tensor_names: set[str]) -> LlamaConfig:
    architecture = metadata.need("general.architecture")
    if architecture != "llama":
        message = f'the architecture is "{architecture}"; the reference engine runs "llama" only'
        raise ConfigError([message], str(metadata.path))
    heads = metadata.need("llama.attention.head_count")
    hidden = metadata.need("llama.embedding_length")
    head_size = metadata.get("llama.attention.key_length", hidden // heads)
    problems = _unsupported(metadata, tensor_names, head_size)
    if problems:
        raise ConfigError(problems, str(metadata.path))
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    eos_keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
    eos_ids = [metadata.get(key) for key in eos_keys]
    return LlamaConfig(
        vocab_size=metadata.get("llama.vocab_size", len(tokens)),
        hidden_size=hidden,
        intermediate_size=metadata.need("llama.feed_forward_length"),
        num_layers=metadata.need("llama.block_count"),
        num_heads=heads,
        num_kv_heads=metadata.get("llama.attention.head_count_kv", heads),
        head_size=head_size,
        context_length=metadata.need("llama.context_length"),
        norm_epsilon=metadata.need("llama.attention.layer_norm_rms_epsilon"),
        rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
        rope_scaling=_rope_scaling(metadata),
        tied_embeddings="output.weight" not in tensor_names,
        eos_token_ids=tuple(dict.fromkeys(token for token in eos_ids if token is not None)),
    )


def _unsupported(metadata: _Metadata, tensor_names: set[str], head_size: int) -> list[str]:
    """What in the file this engine cannot compute, each in a sentence."""
    problems = []
    if metadata.get("llama.expert_count", 0):
        problems.append("the model is a mixture of experts, which the reference engine is not")
    if metadata.get("llama.rope.dimension_count", head_size) != head_size:
        problems.append("only part of each head is rotated; the reference engine rotates all of it")
    if "rope_freqs.weight" in tensor_names:
        problems.append(
            'the file scales rotary frequencies by a table ("rope_freqs.weight"), which the '
            "reference engine does not read; use the model's Hugging Face directory instead"
        )
    if any(name.endswith("attn_q.bias") for name in tensor_names):
        problems.append("the projections have biases, which the reference engine does not add")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling not in {"none", "linear"}:
        problems.append(f'the rotary scaling "{scaling}" is unknown; known: "none", "linear"')
    return problems


def _rope_scaling(metadata: _Metadata) -> RopeScaling | None:
    if metadata.get("llama.rope.scaling.type", "none") == "none":
        return None
    return LinearRopeScaling(metadata.need("llama.rope.scaling.factor"))


def _gguf_name(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{_LAYER_NAMES[rest]}"


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Undo GGUF's row order: it keeps rotary partners side by side, Hugging Face half a head apart.

    [heads * head size, in], row 2i + j of a head goes to row j * (head size / 2) + i.
    """
    pairs = weight.view(heads, -1, 2, weight.shape[-1])
    return pairs.transpose(1, 2).reshape(weight.shape)
