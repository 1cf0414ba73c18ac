"""The forward pass of a Llama-family model over a flat batch of the tokens of a step's chunks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from commutator.tokenizer import read_gguf
from commutator_reference.arena import KVArena
from commutator_reference.llama import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LlamaConfig,
    gguf_config,
    hf_config,
)
from commutator_reference.lora import Adapted, add_to, rows_by_adapter
from commutator_reference.scheduler import Chunk
from commutator_reference.weights import (
    LayerWeights,
    Linear,
    LlamaWeights,
    build_weights,
    gguf_tensors,
    hf_tensors,
)

_SCORED_ROWS = 64
"""Logits of this many tokens of a prompt exist at the same time."""
_SHORT_BLOCKS = 8
"""Sequences of at most this many blocks form one group, whatever their length."""


@frozen(eq=False)
class DecodeGroup:
    """Single tokens of sequences of similar length, whose attention is computed together."""

    rows: slice
    count: int
    run_index: Tensor
    """Where the arena holds their KV; [layers, runs]."""
    mask: Tensor
    """0 where a sequence has a token, -inf where it is padding; [count, 1, 1, positions]."""


@frozen(eq=False)
class Prefill:
    """Several consecutive tokens of one sequence."""

    rows: slice
    run_index: Tensor | None
    """Where the arena holds the sequence's KV; None when there is only the chunk's own."""
    mask: Tensor | None
    """0 where a token may attend, -inf elsewhere; [tokens, positions]. None: causal."""


@frozen(eq=False)
class Batch:
    """A flat batch: the tokens of every chunk, one after another."""

    token_ids: Tensor
    positions: Tensor
    write_blocks: Tensor
    write_offsets: Tensor
    decodes: tuple[DecodeGroup, ...]
    prefills: tuple[Prefill, ...]
    sample_rows: Tensor
    sample_keys: tuple[int, ...]
    """Which request each of ``sample_rows`` belongs to."""
    scored: tuple[tuple[Chunk, slice], ...] = ()
    """The chunks that score their prompt, and the rows of their tokens."""
    adapted: Adapted = ()


def build_batch(chunks: Sequence[Chunk], arena: KVArena, dtype: torch.dtype) -> Batch:
    """The batch of ``chunks`` on the arena's device; decodes come first, shortest first."""
    device, size = arena.tensor.device, arena.block_size
    singles = sorted((c for c in chunks if len(c.token_ids) == 1), key=_padded_blocks)
    longer = [chunk for chunk in chunks if len(chunk.token_ids) > 1]
    ordered = [*singles, *longer]
    positions = [p for chunk in ordered for p in range(chunk.start, chunk.end)]
    blocks = [c.block_table[p // size] for c in ordered for p in range(c.start, c.end)]

    decodes, first = [], 0
    for _, group in groupby(singles, key=_padded_blocks):
        members = list(group)
        decodes.append(_decode_group(members, first, arena, dtype))
        first += len(members)
    prefills = []
    for chunk in longer:
        prefills.append(_prefill(chunk, first, arena, dtype))
        first += len(chunk.token_ids)

    last_row, sample_rows = -1, []
    scored: list[tuple[Chunk, slice]] = []
    for chunk in ordered:
        last_row += len(chunk.token_ids)
        if chunk.scores:
            scored.append((chunk, slice(last_row + 1 - len(chunk.token_ids), last_row + 1)))
        if chunk.samples:
            sample_rows.append(last_row)
    return Batch(
        token_ids=torch.tensor([t for c in ordered for t in c.token_ids], device=device),
        positions=torch.tensor(positions, device=device),
        write_blocks=torch.tensor(blocks, device=device),
        write_offsets=torch.tensor([p % size for p in positions], device=device),
        decodes=tuple(decodes),
        prefills=tuple(prefills),
        sample_rows=torch.tensor(sample_rows, dtype=torch.long, device=device),
        sample_keys=tuple(chunk.key for chunk in ordered if chunk.samples),
        scored=tuple(scored),
        adapted=rows_by_adapter(((len(c.token_ids), c.adapter) for c in ordered), device),
    )


def _decode_group(
    chunks: list[Chunk], first: int, arena: KVArena, dtype: torch.dtype
) -> DecodeGroup:
    device, size = arena.tensor.device, arena.block_size
    width = max(_blocks(chunk, size) for chunk in chunks)
    tables = torch.tensor([_padded_table(chunk, width, size) for chunk in chunks], device=device)
    lengths = torch.tensor([chunk.end for chunk in chunks], device=device)
    seen = torch.arange(width * size, device=device) < lengths[:, None]
    return DecodeGroup(
        slice(first, first + len(chunks)),
        len(chunks),
        arena.run_index(tables),
        _additive(seen, dtype)[:, None, None],
    )


def _prefill(chunk: Chunk, first: int, arena: KVArena, dtype: torch.dtype) -> Prefill:
    rows = slice(first, first + len(chunk.token_ids))
    if chunk.start == 0:
        return Prefill(rows, None, None)
    device, size = arena.tensor.device, arena.block_size
    width = _blocks(chunk, size)
    table = torch.tensor([chunk.block_table[:width]], device=device)
    positions = torch.arange(chunk.start, chunk.end, device=device)
    seen = torch.arange(width * size, device=device) <= positions[:, None]
    return Prefill(rows, arena.run_index(table), _additive(seen, dtype))


def _blocks(chunk: Chunk, block_size: int) -> int:
    return -(-chunk.end // block_size)


def _padded_blocks(chunk: Chunk) -> int:
    """The power of two that the number of blocks is rounded up to, to group by."""
    return max(_SHORT_BLOCKS, 1 << (len(chunk.block_table) - 1).bit_length())


def _padded_table(chunk: Chunk, width: int, block_size: int) -> list[int]:
    # Padding repeats the sequence's own last block: whatever is read there is its own.
    table = list(chunk.block_table[: _blocks(chunk, block_size)])
    return table + [table[-1]] * (width - len(table))


def _additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill_(~seen, -torch.inf)


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


def sampled_logits(
    x: Tensor,
    sample_rows: Tensor,
    scored: Sequence[tuple[Chunk, slice]],
    logits: Callable[[Tensor], Tensor],
    score: Callable[[Chunk, int, Tensor], None] | None,
) -> Tensor:
    """The end of a forward pass: scores the prompts that are to be, and returns sampled logits."""
    for chunk, rows in scored:
        assert score is not None
        for first in range(rows.start, rows.stop, _SCORED_ROWS):
            some = x[first : min(first + _SCORED_ROWS, rows.stop)]
            score(chunk, first - rows.start, logits(some))
    return logits(x.index_select(0, sample_rows))


class Abandoned(Exception):  # noqa: N818 - nothing went wrong
    """The result of this forward pass is no longer needed."""


class LlamaModel:
    """Embedding, layers of attention and SwiGLU, and the projection onto the vocabulary."""

    def __init__(self, config: LlamaConfig, weights: LlamaWeights) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self._weights = weights
        self._layers = [_Layer(config, index, w) for index, w in enumerate(weights.layers)]
        self._rope_frequencies = rope_frequencies(config).to(self.device)

    def block_bytes(self, block_size: int) -> int:
        """Size of one KV block."""
        return self.config.kv_bytes(block_size, self.dtype.itemsize)

    def arena(self, num_blocks: int, block_size: int) -> KVArena:
        """KV memory of ``num_blocks`` blocks."""
        return KVArena(self.config, num_blocks, block_size, device=self.device, dtype=self.dtype)

    def batch(self, chunks: Sequence[Chunk], arena: KVArena) -> Batch:
        """The batch of ``chunks`` on the arena's device."""
        return build_batch(chunks, arena, self.dtype)

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        arena: KVArena,
        wanted: Callable[[], bool] = lambda: True,
        score: Callable[[Chunk, int, Tensor], None] | None = None,
    ) -> Tensor:
        """Logits [sampled rows, vocabulary], float32; the KV of every token goes to the arena.

        ``wanted`` is called before each layer. Raises Abandoned once it returns False. ``score``
        gets the logits of chunks that score their prompt, some rows at a time, with the number of
        the first of them in its chunk.
        """
        x = embedding(batch.token_ids, self._weights.embedding)
        tables = rope_tables(self._rope_frequencies, batch.positions, self.dtype)
        for layer in self._layers:
            if not wanted():
                raise Abandoned
            layer(x, batch, arena, tables)
        return sampled_logits(x, batch.sample_rows, batch.scored, self._logits, score)

    def _logits(self, rows: Tensor) -> Tensor:
        norm = self._weights.norm
        normed = rms_norm(rows, norm.shape, norm, self.config.norm_epsilon)
        return self._weights.output(normed).float()


class _Layer:
    def __init__(self, config: LlamaConfig, index: int, weights: LayerWeights) -> None:
        self._index = index
        self._config = config
        self._group_size = config.num_heads // config.num_kv_heads
        """Query heads that share one KV head."""
        self._weights = weights

    def __call__(
        self, x: Tensor, batch: Batch, arena: KVArena, tables: tuple[Tensor, Tensor]
    ) -> None:
        """Add this layer's attention and MLP to ``x`` [tokens, hidden], in place."""
        config, weights = self._config, self._weights
        norm = weights.attention_norm
        normed = rms_norm(x, norm.shape, norm, config.norm_epsilon)
        qkv = self._project("qkv", weights.qkv, normed, batch)
        qkv = qkv.view(len(x), -1, config.head_size)
        rotate_(qkv[:, : config.num_heads + config.num_kv_heads], *tables)
        arena.write(
            self._index, batch.write_blocks, batch.write_offsets, qkv[:, config.num_heads :]
        )
        attended = self._attend(qkv, batch, arena)
        x += self._project("attention_output", weights.attention_output, attended, batch)

        norm = weights.mlp_norm
        normed = rms_norm(x, norm.shape, norm, config.norm_epsilon)
        gate, up = self._project("gate_up", weights.gate_up, normed, batch).chunk(2, dim=-1)
        x += self._project("down", weights.down, silu(gate) * up, batch)

    def _project(self, name: str, weight: Linear, x: Tensor, batch: Batch) -> Tensor:
        made = weight(x)
        return add_to(made, x, batch.adapted, self._index, name) if batch.adapted else made

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
