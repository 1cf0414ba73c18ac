"""The forward pass of models whose layers keep several kinds of KV, over pages.

Attention over everything, a sliding window or chunks, with sinks or without; latent attention; and
gated delta nets; each with a dense MLP or experts. ``families`` reads such models.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from attrs import field, frozen
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu, softplus

from commutator_engine_kit.kv import KvGroup, KvKind
from commutator_reference.block_pool import NOTHING
from commutator_reference.delta_net import delta_rule, delta_step
from commutator_reference.experts import Mlp
from commutator_reference.model import Abandoned, rope_tables, rotate_, sampled_logits
from commutator_reference.pages import LayerKv, PageArena, PagePlan, plan_pages
from commutator_reference.scheduler import Chunk
from commutator_reference.weights import Linear


@frozen(kw_only=True)
class DecoderConfig:
    """What the engine needs to know of a model."""

    vocab_size: int
    hidden_size: int
    context_length: int
    norm_epsilon: float
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerKv, ...]
    """What each layer keeps."""
    embedding_scale: float = 1.0


@frozen(eq=False)
class Rope:
    """Rotary positions of one kind of layers."""

    frequencies: Tensor
    """Radians a position, [rotated size / 2]."""
    scale: float = 1.0
    """Of cosines and sines."""


@frozen(eq=False)
class _Piece:
    """Tokens whose attention is computed together: one each of some sequences, or of one."""

    rows: slice
    pages: Tensor
    """[sequences, pages of each]"""
    mask: Tensor
    """True where a token attends; [sequences, 1, 1, positions] or [tokens, positions]."""
    decodes: bool


@frozen(eq=False)
class _States:
    """Where recurrent layers read and write states."""

    decodes: Tensor
    """Rows that continue a sequence by one token."""
    read: Tensor
    write: Tensor
    """The pages of these rows' states, before and after."""
    runs: tuple[tuple[slice, int | None, tuple[tuple[int, int], ...]], ...]
    """Other tokens: rows, the page with the state before them (None: zeros), and each row at which
    a state is to be kept, exclusive, with its page."""


@frozen(eq=False)
class DecoderBatch:
    """The tokens of every chunk, one after another, single ones first."""

    token_ids: Tensor
    positions: Tensor
    offsets: Tensor
    """Of each token in its block."""
    pages: tuple[Tensor, ...]
    """Of each group: the page of each token's block."""
    pieces: tuple[tuple[_Piece, ...], ...]
    """Of each group of attention."""
    states: tuple[_States | None, ...]
    """Of each recurrent group."""
    sample_rows: Tensor
    sample_keys: tuple[int, ...]
    scored: tuple[tuple[Chunk, slice], ...]
    _rotations: dict[Rope, tuple[Tensor, Tensor]] = field(factory=dict, init=False)

    def rotation(self, rope: Rope, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of the tokens' positions; made once for all layers alike."""
        if (found := self._rotations.get(rope)) is None:
            tables = rope_tables(rope.frequencies, self.positions, dtype)
            found = self._rotations[rope] = (tables[0] * rope.scale, tables[1] * rope.scale)
        return found


def _batch(chunks: Sequence[Chunk], plan: PagePlan, device: torch.device) -> DecoderBatch:
    size = plan.block_size
    singles = sorted((c for c in chunks if len(c.token_ids) == 1), key=lambda c: c.end)
    ordered = [*singles, *(c for c in chunks if len(c.token_ids) > 1)]
    starts, row = [], 0
    for chunk in ordered:
        starts.append(row)
        row += len(chunk.token_ids)
    positions = [p for c in ordered for p in range(c.start, c.end)]
    pieces: list[tuple[_Piece, ...]] = []
    states: list[_States | None] = []
    masks: dict[tuple[KvKind, int, int], Tensor] = {}
    for number, group in enumerate(plan.groups):
        tables = [chunk.tables[number] for chunk in ordered]
        if group.kind is KvKind.RECURRENT:
            pieces.append(())
            states.append(_group_states(group, ordered, starts, tables, device))
        else:
            pieces.append(tuple(_pieces(group, ordered, starts, tables, device, masks)))
            states.append(None)
    rows = [slice(at, at + len(c.token_ids)) for at, c in zip(starts, ordered, strict=True)]
    return DecoderBatch(
        token_ids=torch.tensor([t for c in ordered for t in c.token_ids], device=device),
        positions=torch.tensor(positions, device=device),
        offsets=torch.tensor([p % size for p in positions], device=device),
        pages=tuple(
            torch.tensor(
                [c.tables[g][p // size] for c in ordered for p in range(c.start, c.end)],
                device=device,
            )
            for g in range(len(plan.groups))
        ),
        pieces=tuple(pieces),
        states=tuple(states),
        sample_rows=torch.tensor(
            [r.stop - 1 for r, c in zip(rows, ordered, strict=True) if c.samples],
            dtype=torch.long,
            device=device,
        ),
        sample_keys=tuple(c.key for c in ordered if c.samples),
        scored=tuple((c, r) for r, c in zip(rows, ordered, strict=True) if c.scores),
    )


def _pieces(
    group: KvGroup,
    chunks: Sequence[Chunk],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    device: torch.device,
    masks: dict[tuple[KvKind, int, int], Tensor],
) -> list[_Piece]:
    """``masks`` are shared by groups that see alike, by kind, window and number of the piece."""
    size = group.block_size
    spans = [(group.first_needed(c.start), -(-c.end // size)) for c in chunks]
    for needed, (first, stop) in zip(tables, spans, strict=True):
        _must_be_there(group, needed[first:stop], stop - first)
    singles = sum(len(chunk.token_ids) == 1 for chunk in chunks)
    pieces: list[_Piece] = []
    at = 0
    padded = [1 << (stop - first - 1).bit_length() for first, stop in spans[:singles]]
    for _, members in groupby(padded):
        count = len(list(members))
        some = range(at, at + count)
        at += count
        width = max(spans[n][1] - spans[n][0] for n in some)
        pages, positions = [], []
        for n in some:
            first, stop = spans[n]
            own = list(tables[n][first:stop])
            # Padding repeats the sequence's own last page, at positions that nothing attends to.
            pages.append(own + [own[-1]] * (width - len(own)))
            positions.append(first * size)
        seen = group.kind, group.window, len(pieces)
        if (mask := masks.get(seen)) is None:
            where = torch.tensor(positions, device=device)[:, None] + torch.arange(
                width * size, device=device
            )
            queries = torch.tensor([chunks[n].start for n in some], device=device)[:, None]
            mask = masks[seen] = _seen(group, queries, where)[:, None, None]
        rows = slice(some.start, some.stop)
        pieces.append(_Piece(rows, torch.tensor(pages, device=device), mask, True))
    for n in range(singles, len(chunks)):
        first, stop = spans[n]
        seen = group.kind, group.window, len(pieces)
        if (mask := masks.get(seen)) is None:
            where = torch.arange(first * size, stop * size, device=device)
            queries = torch.arange(chunks[n].start, chunks[n].end, device=device)[:, None]
            mask = masks[seen] = _seen(group, queries, where)
        rows = slice(starts[n], starts[n] + len(chunks[n].token_ids))
        table = torch.tensor([list(tables[n][first:stop])], device=device)
        pieces.append(_Piece(rows, table, mask, False))
    return pieces


def _seen(group: KvGroup, queries: Tensor, where: Tensor) -> Tensor:
    seen = where <= queries
    if group.kind is KvKind.SLIDING:
        seen &= where > queries - group.window
    elif group.kind is KvKind.CHUNKED:
        seen &= where // group.window == queries // group.window
    return seen


def _must_be_there(group: KvGroup, pages: Sequence[int], count: int) -> None:
    """Raise ValueError where a page that would be read or written was released, or never found."""
    if len(pages) != count or NOTHING in pages:
        raise ValueError(f"a {group.kind} group needs {count} pages, and has {list(pages)}")


def _group_states(
    group: KvGroup,
    chunks: Sequence[Chunk],
    starts: Sequence[int],
    tables: Sequence[Sequence[int]],
    device: torch.device,
) -> _States:
    size = group.block_size
    rows, read, write = [], [], []
    runs: list[tuple[slice, int | None, tuple[tuple[int, int], ...]]] = []
    for chunk, at, table in zip(chunks, starts, tables, strict=True):
        first, stop = max(0, chunk.start - 1) // size, -(-chunk.end // size)
        _must_be_there(group, table[first:stop], stop - first)
        source = table[first] if chunk.start else None
        if len(chunk.token_ids) == 1 and source is not None:
            rows.append(at)
            read.append(source)
            write.append(table[chunk.start // size])
            continue
        ends = [*range((chunk.start // size + 1) * size, chunk.end, size), chunk.end]
        kept = tuple((at + end - chunk.start, table[(end - 1) // size]) for end in ends)
        runs.append((slice(at, at + len(chunk.token_ids)), source, kept))
    decodes, before, after = (
        torch.tensor(each, dtype=torch.long, device=device) for each in (rows, read, write)
    )
    return _States(decodes, before, after, tuple(runs))


class Mixer(ABC):
    """What lets a layer's tokens see earlier ones."""

    @abstractmethod
    def __call__(self, x: Tensor, batch: DecoderBatch, arena: PageArena, group: int) -> Tensor:
        """Of normed tokens [tokens, hidden], what is added to them; writes and reads pages."""

    def _rotated(self, heads: Tensor, rope: Rope | None, batch: DecoderBatch) -> None:
        """Rotate the first part of each head in place, as far as there are frequencies."""
        if rope is not None:
            cosines, sines = batch.rotation(rope, heads.dtype)
            rotate_(heads[..., : cosines.shape[-1]], cosines, sines)


def _attend(
    queries: Tensor,
    piece: _Piece,
    keys: Tensor,
    values: Tensor,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """[tokens, heads, value size] of ``queries`` [tokens, heads, head size].

    ``keys``, ``values`` [sequences, KV heads, positions, size].
    """
    kv_heads = keys.shape[1]
    shared = queries.shape[1] // kv_heads
    grouped = queries.unflatten(1, (kv_heads, shared))
    if not piece.decodes:
        grouped = grouped.permute(1, 2, 0, 3)
        keys, values = keys[0][:, None], values[0][:, None]
    if sinks is not None:
        scores = (grouped @ keys.transpose(-1, -2)) * scale
        scores = scores.masked_fill(~piece.mask, -torch.inf)
        ones = (1,) if piece.decodes else (1, 1)
        extra = sinks.view(kv_heads, shared, *ones).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, extra.to(scores.dtype)), -1).softmax(-1)[..., :-1]
        attended = weights @ values
    else:
        if not piece.decodes:
            keys = keys.expand(-1, shared, -1, -1)
            values = values.expand(-1, shared, -1, -1)
        attended = scaled_dot_product_attention(
            grouped, keys, values, attn_mask=piece.mask, scale=scale
        )
    if not piece.decodes:
        attended = attended.permute(2, 0, 1, 3)
    return attended.flatten(1, 2)


@frozen(eq=False, kw_only=True)
class Attention(Mixer):
    """Attention of grouped query heads."""

    layer: int
    heads: int
    kv_heads: int
    head_size: int
    scale: float
    projection: Linear
    """Makes queries, keys and values, head by head, and then the gates, where there are some."""
    output: Linear
    rope: Rope | None
    bias: Tensor | None = None
    output_bias: Tensor | None = None
    norm: Tensor | None = None
    """[heads + KV heads, head size], of queries and keys."""
    norm_epsilon: float = 1e-6
    norm_after_rope: bool = False
    """Whether query and key are divided by their root mean square, after they are rotated."""
    gated: bool = False
    sinks: Tensor | None = None
    """Of each head: a logit that takes part in the softmax and has no value."""
    temperature: tuple[int, float] | None = None
    """Positions and scale by which queries grow: Llama 4's layers without rotary positions."""

    def __call__(self, x: Tensor, batch: DecoderBatch, arena: PageArena, group: int) -> Tensor:
        made = _plus(self.projection(x), self.bias).view(len(x), -1, self.head_size)
        turned, own = self.heads + self.kv_heads, self.heads + 2 * self.kv_heads
        both = made[:, :turned]
        if self.norm is not None:
            plain = rms_norm(both, (self.head_size,), eps=self.norm_epsilon)
            torch.mul(plain, self.norm, out=both)
        self._rotated(both, self.rope, batch)
        if self.norm_after_rope:
            both.copy_(rms_norm(both, (self.head_size,), eps=self.norm_epsilon))
        query = made[:, : self.heads]
        if self.temperature is not None:
            floor, scale = self.temperature
            grown = torch.log1p(((batch.positions + 1.0) / floor).floor()) * scale + 1.0
            query = query * grown[:, None, None].to(query.dtype)
        pages = arena.layer(
            self.layer, (2, self.kv_heads, arena.block_size, self.head_size), x.dtype
        )
        pages[batch.pages[group], :, :, batch.offsets] = made[:, self.heads : own].unflatten(
            1, (2, self.kv_heads)
        )
        parts = []
        for piece in batch.pieces[group]:
            read = pages[piece.pages].permute(2, 0, 3, 1, 4, 5).flatten(3, 4)
            parts.append(
                _attend(query[piece.rows], piece, read[0], read[1], self.scale, self.sinks)
            )
        attended = torch.cat(parts).flatten(1)
        if self.gated:
            attended = attended * made[:, own:].flatten(1).sigmoid()
        return _plus(self.output(attended), self.output_bias)


@frozen(eq=False, kw_only=True)
class LatentAttention(Mixer):
    """Attention whose keys and values are made from one compressed row for each token.

    The row is cached as it is; the matrices that would make keys and values from it are applied to
    the query and to what is attended instead (DeepSeek-V2, section 2.1).
    """

    layer: int
    heads: int
    rank: int
    plain_size: int
    rope_size: int
    scale: float
    query: Callable[[Tensor], Tensor]
    compress: Linear
    compress_norm: Tensor
    norm_epsilon: float
    key_up: Tensor
    """[heads, plain size, rank]"""
    value_up: Tensor
    """[heads, value size, rank]"""
    output: Linear
    rope: Rope

    def __call__(self, x: Tensor, batch: DecoderBatch, arena: PageArena, group: int) -> Tensor:
        query = self.query(x).view(len(x), self.heads, -1)
        plain, turned = query.split([self.plain_size, self.rope_size], -1)
        latent, key = self.compress(x).split([self.rank, self.rope_size], -1)
        latent = rms_norm(latent, (self.rank,), self.compress_norm, self.norm_epsilon)
        turned, key = turned.contiguous(), key[:, None].contiguous()
        self._rotated(turned, self.rope, batch)
        self._rotated(key, self.rope, batch)
        width = self.rank + self.rope_size
        pages = arena.layer(self.layer, (arena.block_size, width), x.dtype)
        pages[batch.pages[group], batch.offsets] = torch.cat((latent, key[:, 0]), -1)
        wanted = torch.cat((torch.einsum("thp,hpr->thr", plain, self.key_up), turned), -1)
        parts = []
        for piece in batch.pieces[group]:
            rows = pages[piece.pages].flatten(1, 2)[:, None]
            part = _attend(
                wanted[piece.rows], piece, rows, rows[..., : self.rank], self.scale, None
            )
            parts.append(part)
        attended = torch.einsum("thr,hvr->thv", torch.cat(parts), self.value_up)
        return self.output(attended.flatten(1))


@frozen(eq=False, kw_only=True)
class DeltaNet(Mixer):
    """A gated delta net behind a short causal convolution (Qwen3-Next)."""

    layer: int
    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    mixed: Linear
    """Makes queries, keys, values and gates, key head by key head."""
    controls: Linear
    """Makes strengths and decays, key head by key head."""
    convolution: Tensor
    """[channels, tokens], float32"""
    decay: Tensor
    """[value heads], float32: the log of how much of a state is left, for a unit of its control."""
    decay_bias: Tensor
    norm: Tensor
    norm_epsilon: float
    output: Linear

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def __call__(self, x: Tensor, batch: DecoderBatch, arena: PageArena, group: int) -> Tensor:
        shared = self.value_heads // self.key_heads
        sizes = [self.key_size, self.key_size, shared * self.value_size, shared * self.value_size]
        mixed = self.mixed(x).view(len(x), self.key_heads, -1).split(sizes, -1)
        gate = mixed[3].reshape(len(x), self.value_heads, self.value_size)
        inputs = torch.cat([each.flatten(1) for each in mixed[:3]], -1)
        strength, decay = self.controls(x).view(len(x), self.key_heads, -1).chunk(2, -1)
        strength = strength.flatten(1).float().sigmoid()
        log_decay = self.decay * softplus(decay.flatten(1).float() + self.decay_bias)
        states = batch.states[group]
        assert states is not None, "a recurrent layer is in a recurrent group"
        answers = self._recur(inputs, log_decay, strength, states, arena)
        normed = rms_norm(answers, (self.value_size,), eps=self.norm_epsilon).to(x.dtype)
        gated = (normed * self.norm).float() * silu(gate.float())
        return self.output(gated.to(x.dtype).flatten(1))

    def _recur(
        self,
        inputs: Tensor,
        log_decay: Tensor,
        strength: Tensor,
        states: _States,
        arena: PageArena,
    ) -> Tensor:
        """[tokens, value heads, value size], float32; reads and writes states."""
        taps = self.convolution.shape[-1]
        window = (taps - 1) * self.channels
        matrix = self.value_heads * self.key_size * self.value_size
        pages = arena.layer(self.layer, (window + matrix,), torch.float32)
        answers = inputs.new_zeros(
            (len(inputs), self.value_heads, self.value_size), dtype=torch.float32
        )
        shape = (self.value_heads, self.key_size, self.value_size)
        if len(states.decodes):
            kept = pages[states.read]
            past = kept[:, :window].unflatten(1, (taps - 1, self.channels))
            newest = inputs[states.decodes].float()
            seen = torch.cat((past, newest[:, None]), 1)
            query, key, value = self._heads((seen * self.convolution.T).sum(1))
            answer, state = delta_step(
                query,
                key,
                value,
                log_decay[states.decodes],
                strength[states.decodes],
                kept[:, window:].unflatten(1, shape),
            )
            answers[states.decodes] = answer
            pages[states.write] = torch.cat((seen[:, 1:].flatten(1), state.flatten(1)), 1)
        for rows, before, kept_at in states.runs:
            page = None if before is None else pages[before]
            past = inputs.new_zeros((taps - 1, self.channels), dtype=torch.float32)
            state = past.new_zeros(shape)
            if page is not None:
                past, state = page[:window].view_as(past), page[window:].view(shape)
            seen = torch.cat((past, inputs[rows].float()))
            mixed = torch.nn.functional.conv1d(
                seen.T[None], self.convolution[:, None], groups=self.channels
            )
            query, key, value = self._heads(mixed[0].T)
            first = rows.start
            for stop, target in kept_at:
                part = slice(first - rows.start, stop - rows.start)
                here = slice(first, stop)
                answers[here], state = delta_rule(
                    query[part], key[part], value[part], log_decay[here], strength[here], state
                )
                window_rows = seen[part.stop : part.stop + taps - 1]
                pages[target] = torch.cat((window_rows.flatten(), state.flatten()))
                first = stop
        return answers

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of each value head, of what the convolution made."""
        all_keys = self.key_heads * self.key_size
        query, key, value = silu(mixed).split(
            [all_keys, all_keys, self.value_heads * self.value_size], -1
        )
        shared = self.value_heads // self.key_heads
        query, key = (
            _unit(each.unflatten(-1, (self.key_heads, self.key_size))).repeat_interleave(shared, 1)
            for each in (query, key)
        )
        value = value.unflatten(-1, (self.value_heads, self.value_size))
        return query / math.sqrt(self.key_size), key, value


def _unit(heads: Tensor) -> Tensor:
    return heads * torch.rsqrt((heads * heads).sum(-1, keepdim=True) + 1e-6)


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias


@frozen(eq=False, kw_only=True)
class DecoderLayer:
    """One layer. Norms after attention and MLP are Gemma's."""

    mixer: Mixer
    mlp: Mlp
    norm: Tensor
    mlp_norm: Tensor
    norm_after: Tensor | None = None
    mlp_norm_after: Tensor | None = None


class DecoderModel:
    """Embedding, layers, and the projection onto the vocabulary."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Sequence[DecoderLayer],
        *,
        embedding_weights: Tensor,
        norm: Tensor,
        output: Linear,
    ) -> None:
        self.config = config
        self.device = embedding_weights.device
        self.dtype = embedding_weights.dtype
        self._layers = layers
        self._embedding = embedding_weights
        self._norm = norm
        self._output = output

    def pages(self, block_size: int) -> PagePlan:
        """The pages that hold a block of at least ``block_size`` tokens."""
        return plan_pages(self.config.layers, block_size, self.dtype.itemsize)

    def block_bytes(self, block_size: int) -> int:
        """Size of one page."""
        return self.pages(block_size).page_bytes

    def arena(self, num_blocks: int, block_size: int) -> PageArena:
        """KV memory of ``num_blocks`` pages."""
        return PageArena(self.pages(block_size), num_blocks, device=self.device, dtype=self.dtype)

    def batch(self, chunks: Sequence[Chunk], arena: PageArena) -> DecoderBatch:
        """The batch of ``chunks`` on the arena's device."""
        return _batch(chunks, arena.plan, self.device)

    @torch.inference_mode()
    def forward(
        self,
        batch: DecoderBatch,
        arena: PageArena,
        wanted: Callable[[], bool] = lambda: True,
        score: Callable[[Chunk, int, Tensor], None] | None = None,
    ) -> Tensor:
        """As ``LlamaModel.forward``."""
        x = embedding(batch.token_ids, self._embedding)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)
        for number, layer in enumerate(self._layers):
            if not wanted():
                raise Abandoned
            group, _ = arena.plan.places[number]
            added = layer.mixer(self._normed(x, layer.norm), batch, arena, group)
            x = x + self._normed(added, layer.norm_after)
            x = x + self._normed(layer.mlp(self._normed(x, layer.mlp_norm)), layer.mlp_norm_after)
        return sampled_logits(x, batch.sample_rows, batch.scored, self._logits, score)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return rms_norm(x, weight.shape, weight, self.config.norm_epsilon)

    def _logits(self, rows: Tensor) -> Tensor:
        return self._output(self._normed(rows, self._norm)).float()
