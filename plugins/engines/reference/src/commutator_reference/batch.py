"""Turns a step's chunks into the index tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from attrs import frozen
from torch import Tensor

from commutator_reference.arena import KVArena
from commutator_reference.scheduler import Chunk

__all__ = ["Batch", "DecodeGroup", "Prefill", "build_batch"]

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
    for chunk in ordered:
        last_row += len(chunk.token_ids)
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
