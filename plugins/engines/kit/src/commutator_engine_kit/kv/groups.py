"""KV groups: the kinds of KV that a model has, and where a prompt can be resumed with all of them.

A group is some layers of one kind. Its blocks are stored, found, loaded and evicted for themselves;
a prompt can be resumed at a boundary only if every group has what its layers read there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

from attrs import evolve, frozen

from commutator.contract.block import CacheIdentity
from commutator.errors import ConfigError


class KvKind(StrEnum):
    """What the layers of a group keep of a prompt."""

    FULL = "full"
    """Keys and values of every token."""
    SLIDING = "sliding"
    """Keys and values; a token reads those of the last ``window`` tokens, itself included."""
    CHUNKED = "chunked"
    """Keys and values; a token reads those of its own chunk of ``window`` tokens."""
    LATENT = "latent"
    """One compressed row for every token (MLA)."""
    LATENT_INDEX = "latent_index"
    """The rows by which sparse attention chooses among latent ones."""
    RECURRENT = "recurrent"
    """A state computed from all tokens so far; a block is the state at the block's end."""
    CROSS = "cross"
    """Keys and values of an encoder's output, which a prompt's tokens do not identify."""
    DRAFT = "draft"
    """Keys and values of layers that draft tokens."""


_WINDOWED = {KvKind.SLIDING, KvKind.CHUNKED}
_WHOLE_PREFIX = {KvKind.FULL, KvKind.LATENT, KvKind.LATENT_INDEX, KvKind.DRAFT}


@frozen(kw_only=True)
class KvGroup:
    """Layers of one kind. Raises ConfigError for sizes that cannot be."""

    kind: KvKind
    block_size: int
    """Tokens in a block; of recurrent layers: tokens from one kept state to the next."""
    window: int = 0
    """Tokens in the window or chunk; 0 for other kinds."""
    layers: tuple[str, ...] = ()
    """The layers' names, in the order of their bytes in a block."""
    block_bytes: int = 0
    """Size of one block; 0 where it is not known."""
    layout: str = ""
    """Order, sizes and number formats of what a block holds; compared as text."""

    def __attrs_post_init__(self) -> None:
        problems = []
        if self.block_size < 1:
            problems.append(f"a block of {self.block_size} tokens; it needs at least 1")
        if (self.window > 0) != (self.kind in _WINDOWED):
            problems.append(f"a window of {self.window} tokens in a group of kind {self.kind}")
        if problems:
            raise ConfigError(problems, "KV group")

    @property
    def keeps_prefix(self) -> bool:
        """Whether every block before a boundary is needed there."""
        return self.kind in _WHOLE_PREFIX

    @property
    def most_blocks(self) -> int:
        """The most blocks that one token reads or writes, however long its sequence; 0: no limit.

        Of recurrent layers that is one, the state.
        """
        match self.kind:
            case KvKind.SLIDING:
                return (self.window - 2) // self.block_size + 2
            case KvKind.CHUNKED:
                size, window = self.block_size, self.window
                # Of chunks, one begins the latest within a block at size - gcd.
                return -(-(size - math.gcd(size, window) + window) // size)
            case KvKind.RECURRENT:
                return 1
            case _:
                return 0

    @property
    def identity(self) -> str:
        """The group as ``CacheIdentity.group``: equal only for groups with equal bytes."""
        return json.dumps([self.kind, self.window, self.layers, self.layout])

    def first_needed(self, position: int) -> int:
        """The first block that is read to compute the token at ``position``, in tokens."""
        match self.kind:
            case KvKind.SLIDING:
                return max(0, position - self.window + 1) // self.block_size
            case KvKind.CHUNKED:
                return position // self.window * self.window // self.block_size
            case KvKind.RECURRENT:
                return max(0, position - 1) // self.block_size
            case _:
                return 0

    def needed(self, boundary: int) -> range:
        """The blocks that are needed to compute the token at ``boundary``, where a block ends.

        Of recurrent layers that is one block.
        """
        return range(self.first_needed(boundary), boundary // self.block_size)


def whole(block_size: int, block_bytes: int = 0) -> tuple[KvGroup]:
    """The only group of a model with one kind of KV: all of its layers read every token."""
    return (KvGroup(kind=KvKind.FULL, block_size=block_size, block_bytes=block_bytes),)


def group_identities(base: CacheIdentity, groups: Sequence[KvGroup]) -> tuple[CacheIdentity, ...]:
    """The identity of each group's blocks.

    A block of one group is never taken for one of another. The only group of a model keeps the
    model's own identity if it needs the whole prefix, so that what is stored stays valid.
    """
    if len(groups) == 1 and groups[0].keeps_prefix:
        return (base,)
    return tuple(
        evolve(base, group=group.identity, block_size=group.block_size) for group in groups
    )


def announced_group(groups: Sequence[KvGroup]) -> int | None:
    """The group whose blocks routers follow: the first that needs the whole prefix, if any."""
    return next((number for number, group in enumerate(groups) if group.keeps_prefix), None)


def sequence_bytes(groups: Sequence[KvGroup]) -> dict[str, tuple[float, int]]:
    """As ``KvStatistics.sequence_bytes``, in whole blocks where a sequence has a limit.

    Groups of one kind with one window are counted together; those whose size is not known are
    left out.
    """
    found: dict[str, tuple[float, int]] = {}
    for group in groups:
        if not group.block_bytes:
            continue
        name = f"{group.kind} {group.window}" if group.window else str(group.kind)
        token, most = found.get(name, (0.0, 0))
        if group.kind is not KvKind.RECURRENT:
            token += group.block_bytes / group.block_size
        found[name] = token, most + group.most_blocks * group.block_bytes
    return found


def alignment(groups: Sequence[KvGroup]) -> int:
    """Boundaries are multiples of this many tokens: there a block of every group ends."""
    return math.lcm(*(group.block_size for group in groups))


def is_behind(group: KvGroup, index: int, prompt_tokens: int, step_tokens: int) -> bool:
    """Whether a prompt's block is of no use to what continues the prompt, or repeats it.

    So are blocks behind the last window and states before the last one. ``step_tokens``: between
    boundaries, as ``alignment`` says.
    """
    if group.keeps_prefix:
        return False
    return index < group.needed(max(0, prompt_tokens - 1) // step_tokens * step_tokens).start


def usable_boundaries(
    groups: Sequence[KvGroup], there: Sequence[Sequence[bool]], limit_tokens: int
) -> Iterator[int]:
    """Where the prompt can be resumed with what is there, in tokens, from the last to the first.

    ``there`` says of each group's blocks, from the prompt's first, whether they are on the device
    or in a tier; those beyond its length are not. No boundary is beyond ``limit_tokens``, or 0.
    """
    if any(group.kind is KvKind.CROSS for group in groups):
        return
    step = alignment(groups)
    runs = [_runs(blocks) for blocks in there]
    limit = limit_tokens
    for group, run in zip(groups, runs, strict=True):
        if group.keeps_prefix:
            whole_run = next((at for at, length in enumerate(run) if not length), len(run))
            limit = min(limit, whole_run * group.block_size)
    rest = [pair for pair in zip(groups, runs, strict=True) if not pair[0].keeps_prefix]
    for boundary in range(limit // step * step, 0, -step):
        if all(_serves(group, run, boundary) for group, run in rest):
            yield boundary


def shared_boundary(
    groups: Sequence[KvGroup], there: Sequence[Sequence[bool]], limit_tokens: int
) -> int:
    """The last of ``usable_boundaries`` if windows and states were everywhere; 0 without others.

    That is how much of the prompt others have had, as far as their KV is there.
    """
    whole = [pair for pair in zip(groups, there, strict=True) if pair[0].keeps_prefix]
    if not whole:
        return 0
    step = alignment(groups)
    shared = usable_boundary(
        [group for group, _ in whole], [blocks for _, blocks in whole], limit_tokens
    )
    return shared // step * step


def usable_boundary(
    groups: Sequence[KvGroup], there: Sequence[Sequence[bool]], limit_tokens: int
) -> int:
    """The last of ``usable_boundaries``, or 0: the largest boundary that all groups can serve."""
    return next(usable_boundaries(groups, there, limit_tokens), 0)


def _runs(blocks: Sequence[bool]) -> list[int]:
    """For each block, how many in a row up to it are there."""
    runs, length = [], 0
    for present in blocks:
        length = length + 1 if present else 0
        runs.append(length)
    return runs


def _serves(group: KvGroup, runs: Sequence[int], boundary: int) -> bool:
    needed = group.needed(boundary)
    end = needed.stop
    return not needed or (end <= len(runs) and runs[end - 1] >= len(needed))
