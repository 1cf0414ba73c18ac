"""The forward pass of a Llama-family model over a flat batch of tokens from many sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from commutator.tokenizer import read_gguf
from commutator_reference.arena import KVArena
from commutator_reference.batch import Batch, DecodeGroup, Prefill
from commutator_reference.llama import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LlamaConfig,
    gguf_config,
    hf_config,
)
from commutator_reference.weights import (
    LayerWeights,
    LlamaWeights,
    build_weights,
    gguf_tensors,
    hf_tensors,
)

__all__ = [
    "Abandoned",
    "Linear",
    "LlamaModel",
    "load_model",
    "rope_frequencies",
    "rope_tables",
    "rotate_",
]


def rope_frequencies(config: LlamaConfig) -> Tensor:
    """Radians a position, [head_size / 2], float32: theta ** (-2i / head_size), then scaled."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32) / config.head_size
    frequencies = 1.0 / config.rope_theta**exponents
    match config.rope_scaling:
        case None:
            return frequencies
        case LinearRopeScaling(factor):
            return frequencies / factor
        case Llama3RopeScaling() as scaling:
            return _scaled_as_llama3(frequencies, scaling)


def _scaled_as_llama3(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """The scaling of Llama 3.1's reference implementation.

    With r = original context length / wavelength: frequencies with r >= high stay unchanged, those
    with r <= low are divided by the factor, between the two they are interpolated linearly in r.
    """
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_context_length * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def rope_tables(
    frequencies: Tensor, positions: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [tokens, 1, head_size], for ``rotate_``."""
    angles = positions[:, None].to(torch.float32) * frequencies
    cos, sin = angles.cos(), angles.sin()
    cosines = torch.cat((cos, cos), dim=-1)
    signed_sines = torch.cat((-sin, sin), dim=-1)
    return cosines[:, None].to(dtype), signed_sines[:, None].to(dtype)


def rotate_(heads: Tensor, cosines: Tensor, signed_sines: Tensor) -> None:
    """Rotate ``heads`` [tokens, heads, head_size] in place.

    Each pair (x[i], x[i + size/2]) turns by its angle; rolling by half brings partners together.
    """
    partners = heads.roll(heads.shape[-1] // 2, dims=-1)
    heads.mul_(cosines).addcmul_(partners, signed_sines)


class Linear:
    """``x @ weight.T`` for one weight [out, in].

    On CPUs float32 weights are stored in oneDNN's blocked order, as PyTorch's own compiler does:
    for the few rows of a decode batch it is twice as fast as the plain order.
    """

    def __init__(self, weight: Tensor) -> None:
        self._packed = _can_pack(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight  # noqa: SLF001

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self._packed:
            result: Tensor = _packed_linear(x, self._weight, None, "none", [], "")
            return result
        return linear(x, self._weight)


def _can_pack(weight: Tensor) -> bool:
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _packed_linear(*arguments: object) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise.default(*arguments)  # noqa: SLF001
    return result


class Abandoned(Exception):  # noqa: N818 - nothing went wrong
    """The result of this forward pass is no longer needed."""


class LlamaModel:
    """Embedding, layers of attention and SwiGLU, and the projection onto the vocabulary."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._embedding = weights.embedding
        self._layers = [_Layer(config, index, w) for index, w in enumerate(weights.layers)]
        self._norm = weights.norm
        self._output = Linear(weights.output)
        self._rope_frequencies = rope_frequencies(config).to(self.device)

    @torch.inference_mode()
    def forward(
        self, batch: Batch, arena: KVArena, wanted: Callable[[], bool] = lambda: True
    ) -> Tensor:
        """Logits [sampled rows, vocabulary], float32; the KV of every token goes to the arena.

        ``wanted`` is called before each layer. Raises Abandoned once it returns False.
        """
        x = embedding(batch.token_ids, self._embedding)
        tables = rope_tables(self._rope_frequencies, batch.positions, self.dtype)
        for layer in self._layers:
            if not wanted():
                raise Abandoned
            layer(x, batch, arena, tables)
        sampled = x.index_select(0, batch.sample_rows)
        normed = rms_norm(sampled, self._norm.shape, self._norm, self.config.norm_epsilon)
        return self._output(normed).float()


class _Layer:
    def __init__(self, config: LlamaConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._config = config
        self._group_size = config.num_heads // config.num_kv_heads
        """Query heads that share one KV head."""
        self._attention_norm = weights.attention_norm
        self._qkv = Linear(weights.qkv)
        self._attention_output = Linear(weights.attention_output)
        self._mlp_norm = weights.mlp_norm
        self._gate_up = Linear(weights.gate_up)
        self._down = Linear(weights.down)

    def __call__(
        self, x: Tensor, batch: Batch, arena: KVArena, tables: tuple[Tensor, Tensor]
    ) -> None:
        """Add this layer's attention and MLP to ``x`` [tokens, hidden], in place."""
        config = self._config
        normed = rms_norm(x, self._attention_norm.shape, self._attention_norm, config.norm_epsilon)
        qkv = self._qkv(normed).view(len(x), -1, config.head_size)
        rotate_(qkv[:, : config.num_heads + config.num_kv_heads], *tables)
        arena.write(
            self._index, batch.write_blocks, batch.write_offsets, qkv[:, config.num_heads :]
        )
        x += self._attention_output(self._attend(qkv, batch, arena))

        normed = rms_norm(x, self._mlp_norm.shape, self._mlp_norm, config.norm_epsilon)
        gate, up = self._gate_up(normed).chunk(2, dim=-1)
        x += self._down(silu(gate) * up)

    def _attend(self, qkv: Tensor, batch: Batch, arena: KVArena) -> Tensor:
        """[tokens, heads * head size]. Query heads are grouped under the KV head they share."""
        parts = [self._attend_decodes(qkv, group, arena) for group in batch.decodes]
        parts += [self._attend_prefill(qkv, chunk, arena) for chunk in batch.prefills]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decodes(self, qkv: Tensor, group: DecodeGroup, arena: KVArena) -> Tensor:
        """Attention of one group; its heads take the axis that usually has a sequence's tokens."""
        config = self._config
        queries = qkv[group.rows, : config.num_heads]
        queries = queries.view(group.count, config.num_kv_heads, self._group_size, -1)
        keys, values = arena.read(group.run_index[self._index], group.count)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
        return attended.reshape(group.count, -1)

    def _attend_prefill(self, qkv: Tensor, chunk: Prefill, arena: KVArena) -> Tensor:
        """The heads of one group are a batch over the same keys and values, which are views."""
        config = self._config
        rows = qkv[chunk.rows]
        queries = rows[:, : config.num_heads]
        queries = queries.unflatten(1, (config.num_kv_heads, self._group_size))
        if chunk.run_index is None:
            keys, values = rows[:, config.num_heads :].transpose(0, 1).chunk(2)
        else:
            keys, values = (side[0] for side in arena.read(chunk.run_index[self._index], 1))
        attended = scaled_dot_product_attention(
            queries.permute(2, 1, 0, 3),
            keys.expand(self._group_size, -1, -1, -1),
            values.expand(self._group_size, -1, -1, -1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended.permute(2, 1, 0, 3).reshape(len(rows), -1)


def load_model(
    path: Path,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> LlamaModel:
    """The model of a GGUF file or a Hugging Face directory (what ``locate_model`` finds).

    Raises ConfigError when it is no Llama model, or one with an option this engine lacks.
    """
    if path.is_dir():
        config, source = hf_config(path), hf_tensors(path)
    else:
        metadata, tensors = read_gguf(path)
        config = gguf_config(path, metadata, tensors)
        source = gguf_tensors(path, tensors, config)
    weights = build_weights(config, source, device=torch.device(device), dtype=dtype)
    return LlamaModel(config, weights)
