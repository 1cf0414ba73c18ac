"""The forward pass of a Llama-family model over a flat batch of tokens from many sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu

from commutator_reference.arena import KVArena
from commutator_reference.batch import Batch, DecodeGroup, Prefill
from commutator_reference.linear import Linear
from commutator_reference.llama_config import LlamaConfig
from commutator_reference.rope import rope_frequencies, rope_tables, rotate_
from commutator_reference.weights import LayerWeights, LlamaWeights

__all__ = ["Abandoned", "LlamaModel"]


class Abandoned(Exception):  # noqa: N818 - nothing went wrong
    """Nobody wants the result of this forward pass any more."""


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

        ``wanted`` is asked before each layer. Raises Abandoned once it says no.
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
        """The heads of one group stand where usually the tokens of one sequence stand."""
        config = self._config
        queries = qkv[group.rows, : config.num_heads]
        queries = queries.view(group.count, config.num_kv_heads, config.group_size, -1)
        keys, values = arena.read(group.run_index[self._index], group.count)
        attended = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask)
        return attended.reshape(group.count, -1)

    def _attend_prefill(self, qkv: Tensor, chunk: Prefill, arena: KVArena) -> Tensor:
        """The heads of one group are a batch over the same keys and values, which are views."""
        config = self._config
        rows = qkv[chunk.rows]
        queries = rows[:, : config.num_heads]
        queries = queries.unflatten(1, (config.num_kv_heads, config.group_size))
        if chunk.run_index is None:
            keys, values = rows[:, config.num_heads :].transpose(0, 1).chunk(2)
        else:
            keys, values = (side[0] for side in arena.read(chunk.run_index[self._index], 1))
        attended = scaled_dot_product_attention(
            queries.permute(2, 1, 0, 3),
            keys.expand(config.group_size, -1, -1, -1),
            values.expand(config.group_size, -1, -1, -1),
            attn_mask=chunk.mask,
            is_causal=chunk.mask is None,
        )
        return attended.permute(2, 1, 0, 3).reshape(len(rows), -1)
