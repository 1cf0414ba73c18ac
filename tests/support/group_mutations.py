"""Mistakes in our own data and code that a model with several kinds of KV would answer wrongly by.

Each has the family of the model that shows it. A mistake in the data is made on the disk between
two runs; one in the code is patched in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from attrs import evolve, frozen
from tests.support.group_trials import Stored, prompts
from torch import Tensor

from commutator.contract.block import CacheIdentity, next_key
from commutator_engine_kit.kv import KvGroup, KvKind
from commutator_engine_kit.kv.loads import Loads
from commutator_reference import decoder, pages, scheduler
from commutator_reference.pages import LayerKv, PagePlan
from commutator_reference.scheduler import Scheduler

__all__ = ["MUTATIONS", "Mutation"]

Patch = Callable[[], Any]
Spoil = Callable[[Stored], None]


@frozen(kw_only=True)
class Mutation:
    """One mistake. Exactly one of ``spoil``, ``reader`` and ``code`` makes it."""

    name: str
    family: str
    spoil: Spoil | None = None
    """Changes what is stored; checks find it."""
    reader: Patch | None = None
    """Code that is wrong in the restarted engine only, with an identity that says so."""
    same_identity: Patch | None = None
    """With ``reader``: takes that away from the identity, to show what it is for."""
    code: Patch | None = None
    """Code that is wrong in all engines."""
    tiers: bool = True
    """False: the engine's own memory, too small for all prompts, is all that there is."""
    caught: bool = True
    """Whether an engine with this mistake finds it itself. If not, tests must."""


def _first(stored: Stored) -> Sequence[int]:
    return prompts(stored.tiered.engine.block_size)[0]


def _other(stored: Stored) -> Sequence[int]:
    return prompts(stored.tiered.engine.block_size)[1]


def _group(stored: Stored, kind: KvKind) -> int:
    """The last group of a kind."""
    groups = stored.tiered.engine.arena.groups
    return max(number for number, group in enumerate(groups) if group.kind is kind)


def _bit(kind: KvKind, index: int = -1) -> Spoil:
    """One bit: the highest but one of a number's exponent."""

    def spoil(stored: Stored) -> None:
        block = stored.find(_first(stored), _group(stored, kind), index)
        content = bytearray(stored.read(block))
        content[-5 - len(content) // 3 // 4 * 4] ^= 0x20
        stored.write(block, bytes(content))

    return spoil


def _changed(kind: KvKind, change: Callable[[bytes], bytes], index: int = -1) -> Spoil:
    def spoil(stored: Stored) -> None:
        block = stored.find(_first(stored), _group(stored, kind), index)
        content = stored.read(block)
        stored.write(block, change(content)[: len(content)])

    return spoil


def _swapped(one: tuple[KvKind, int], two: tuple[KvKind, int], *, other: bool = False) -> Spoil:
    """The bytes of two blocks: group and index; of ``other``, the second is another prompt's."""

    def spoil(stored: Stored) -> None:
        first = stored.find(_first(stored), _group(stored, one[0]), one[1])
        prompt = _other(stored) if other else _first(stored)
        second = stored.find(prompt, _group(stored, two[0]), two[1])
        here, there = stored.read(first), stored.read(second)
        stored.write(first, there)
        stored.write(second, here)

    return spoil


def _copied(kind: KvKind, index: int, source: int) -> Spoil:
    """A block's bytes, from another block of the prompt in the same group."""

    def spoil(stored: Stored) -> None:
        group = _group(stored, kind)
        content = stored.read(stored.find(_first(stored), group, source))
        stored.write(stored.find(_first(stored), group, index), content)

    return spoil


def _shifted(kind: KvKind, count: int) -> Spoil:
    """The last blocks, each where the one after it belongs."""

    def spoil(stored: Stored) -> None:
        group = _group(stored, kind)
        blocks = [stored.find(_first(stored), group, -1 - n) for n in range(count)]
        contents = [stored.read(block) for block in blocks]
        for block, content in zip(blocks, contents[1:], strict=False):
            stored.write(block, content)

    return spoil


def _half_numbers(content: bytes) -> bytes:
    """The same numbers in two bytes each, as an engine with another dtype writes them."""
    numbers = torch.frombuffer(bytearray(content), dtype=torch.float32).to(torch.bfloat16)
    return numbers.view(torch.uint8).numpy().tobytes() + content[len(content) // 2 :]


def _columns(rows: int) -> Callable[[bytes], bytes]:
    """The numbers of a block in another order: token by token as number by number."""

    def change(content: bytes) -> bytes:
        numbers = np.frombuffer(content, np.float32)
        used = len(numbers) // rows * rows
        turned = numbers[:used].reshape(rows, -1).T
        return np.ascontiguousarray(turned).tobytes() + content[4 * used :]

    return change


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def _window_wider_by(tokens: int) -> Patch:
    seen = decoder._seen

    def wrong(group: KvGroup, queries: Tensor, where: Tensor) -> Tensor:
        wider = evolve(group, window=group.window + tokens) if group.window else group
        return seen(wider, queries, where)

    return lambda: patch.object(decoder, "_seen", wrong)


def _released_early() -> Any:
    right = Scheduler._release_behind

    def wrong(self: Scheduler, table: list[int], first: int) -> None:
        right(self, table, min(first + 1, len(table)) if first else 0)

    return patch.object(Scheduler, "_release_behind", wrong)


def _states(change: Callable[[decoder._States], decoder._States]) -> Patch:
    right = decoder._group_states

    def wrong(*arguments: Any) -> decoder._States:
        return change(right(*arguments))

    return lambda: patch.object(decoder, "_group_states", wrong)


def _state_before_run_forgotten(states: decoder._States) -> decoder._States:
    return evolve(states, runs=tuple((rows, None, kept) for rows, _, kept in states.runs))


def _states_kept_one_early(states: decoder._States) -> decoder._States:
    """Every state goes where the one before it belongs."""
    runs = []
    for rows, before, kept in states.runs:
        places = [place for _, place in kept]
        ends = [end for end, _ in kept]
        runs.append((rows, before, tuple(zip(ends, [*places[1:], places[0]], strict=True))))
    return evolve(states, runs=tuple(runs))


def _only_last_state_kept(states: decoder._States) -> decoder._States:
    runs = tuple((rows, before, kept[-1:]) for rows, before, kept in states.runs)
    return evolve(states, runs=runs)


def _without_sinks() -> Any:
    right: Any = decoder._attend

    def wrong(*arguments: Any) -> Tensor:
        attended: Tensor = right(*arguments[:-1], None)
        return attended

    return patch.object(decoder, "_attend", wrong)


def _one_identity_for_all(base: CacheIdentity, groups: Sequence[KvGroup]) -> tuple[Any, ...]:
    return (base,) * len(groups)


@contextmanager
def _groups_share_keys() -> Iterator[None]:
    from commutator_engine_kit.kv import connector

    with ExitStack() as stack:
        for module in (scheduler, connector):
            stack.enter_context(patch.object(module, "group_identities", _one_identity_for_all))
        yield


def _key_without_parent() -> Any:
    return patch.object(scheduler, "next_key", lambda _, tokens: next_key(b"\0" * 32, tokens))


def _boundary_of_full_groups(
    groups: Sequence[KvGroup], there: Sequence[Sequence[bool]], limit_tokens: int
) -> int:
    full = [pair for pair in zip(groups, there, strict=True) if pair[0].keeps_prefix]
    runs = [(group, next((n for n, one in enumerate(has) if not one), len(has)))
            for group, has in full]  # fmt: skip
    return min([limit_tokens, *(run * group.block_size for group, run in runs)])


def _boundary_ignores_windows() -> Any:
    return patch.object(scheduler, "usable_boundary", _boundary_of_full_groups)


def _loads_into(change: Callable[[list[list[int]]], list[list[int]]]) -> Patch:
    right = Loads.onboard_groups

    def wrong(self: Loads, ticket: Any, device_blocks: Any, **more: Any) -> Any:
        return right(self, ticket, change([list(blocks) for blocks in device_blocks]), **more)

    return lambda: patch.object(Loads, "onboard_groups", wrong)


def _next_groups_blocks(blocks: list[list[int]]) -> list[list[int]]:
    """Each group's into those of the next group that has as many."""
    alike: dict[int, list[int]] = {}
    for group, those in enumerate(blocks):
        alike.setdefault(len(those), []).append(group)
    moved = list(blocks)
    for members in alike.values():
        for here, there in zip(members, members[1:] + members[:1], strict=True):
            moved[here] = blocks[there]
    return moved


def _backwards(blocks: list[list[int]]) -> list[list[int]]:
    return [those[::-1] for those in blocks]


def _planned(change: Callable[[PagePlan], PagePlan]) -> Patch:
    right = pages.plan_pages

    def wrong(layers: Sequence[LayerKv], block_size: int, number_bytes: int) -> PagePlan:
        return change(right(layers, block_size, number_bytes))

    return lambda: patch.object(decoder, "plan_pages", wrong)


def _last_layer_first(plan: PagePlan) -> PagePlan:
    """The layers of each group in another order, which the group says."""
    slot_bytes = [plan.page_bytes // len(group.layers) for group in plan.groups]
    places = tuple(
        (group, plan.page_bytes - slot_bytes[group] - offset) for group, offset in plan.places
    )
    groups = tuple(evolve(group, layers=group.layers[::-1]) for group in plan.groups)
    return evolve(plan, groups=groups, places=places)


def _values_first(plan: PagePlan) -> PagePlan:
    """Another name of the layout; ``_values_before_keys`` makes it."""
    groups = tuple(evolve(group, layout=f"other: {group.layout}") for group in plan.groups)
    return evolve(plan, groups=groups)


@contextmanager
def _values_before_keys() -> Iterator[None]:
    """Another version's layout: values, then keys."""
    right = pages.PageArena.layer

    def wrong(self: pages.PageArena, number: int, shape: tuple[int, ...], dtype: Any) -> Tensor:
        view = right(self, number, shape, dtype)
        return _Turned(view) if len(shape) == 4 else view  # type: ignore[return-value]

    with _planned(_values_first)(), patch.object(pages.PageArena, "layer", wrong):
        yield


class _Turned:
    """A view of pages whose two sides are taken for each other."""

    def __init__(self, view: Tensor) -> None:
        self._view = view

    def __getitem__(self, where: Any) -> Tensor:
        return self._view[where].flip(where.dim())

    def __setitem__(self, where: Any, value: Tensor) -> None:
        self._view[where] = value.flip(1)


def _groups_named_by_kind() -> Any:
    return patch.object(KvGroup, "identity", property(lambda self: str(self.kind)))


_F, _S, _C, _L, _R = (
    KvKind.FULL,
    KvKind.SLIDING,
    KvKind.CHUNKED,
    KvKind.LATENT,
    KvKind.RECURRENT,
)


MUTATIONS = (
    # What is stored.
    Mutation(name="a bit of a full block", family="mixtral", spoil=_bit(_F, 3)),
    Mutation(name="a bit of a window's block", family="gemma3", spoil=_bit(_S)),
    Mutation(name="a bit of a chunk's block", family="llama4", spoil=_bit(_C)),
    Mutation(name="a bit of a latent block", family="deepseek_v2", spoil=_bit(_L, 2)),
    Mutation(name="a bit of a state", family="qwen3_next", spoil=_bit(_R)),
    Mutation(name="half a block was written", family="gpt_oss", spoil=_changed(_F, _cut, 5)),
    Mutation(name="half a state was written", family="qwen3_next", spoil=_changed(_R, _cut)),
    Mutation(name="the state of the boundary before", family="qwen3_next",
             spoil=_copied(_R, -1, -2)),
    Mutation(name="the first state", family="qwen3_next", spoil=_copied(_R, -1, 0)),
    Mutation(name="another prompt's state", family="qwen3_next",
             spoil=_swapped((_R, -1), (_R, -1), other=True)),
    Mutation(name="another prompt's window", family="gpt_oss",
             spoil=_swapped((_S, -1), (_S, -1), other=True)),
    Mutation(name="a window shifted by a block", family="gemma3", spoil=_shifted(_S, 3)),
    # Two of one prompt would change nothing: keys are rotated to their positions already.
    Mutation(name="another prompt's full block", family="mixtral",
             spoil=_swapped((_F, -1), (_F, -1), other=True)),
    Mutation(name="blocks of two groups swapped", family="gpt_oss",
             spoil=_swapped((_F, -1), (_S, -1))),
    Mutation(name="a state where keys belong", family="qwen3_next",
             spoil=_swapped((_F, -1), (_R, -1))),
    Mutation(name="a latent block taken as rows of numbers", family="deepseek_v2",
             spoil=_changed(_L, _columns(8), 4)),
    Mutation(name="another dtype's bytes", family="gemma3", spoil=_changed(_F, _half_numbers, 6)),
    Mutation(name="another dtype's latent rows", family="deepseek_v2",
             spoil=_changed(_L, _half_numbers, 6)),
    # Code that says what it stores.
    Mutation(name="a group's layers in another order", family="gpt_oss",
             reader=_planned(_last_layer_first), same_identity=_groups_named_by_kind),
    Mutation(name="values before keys", family="gpt_oss",
             reader=_values_before_keys, same_identity=_groups_named_by_kind),
    # Code that needs what it does not have.
    Mutation(name="windows released a block too early", family="gemma3",
             code=_released_early),
    Mutation(name="chunks released a block too early", family="llama4",
             code=_released_early),
    Mutation(name="a hit where no window is", family="gpt_oss",
             code=_boundary_ignores_windows, tiers=False),
    Mutation(name="a hit where no state is", family="qwen3_next",
             code=_boundary_ignores_windows, tiers=False),
    # Code that computes another thing.
    Mutation(name="a window wider by one", family="gemma3", code=_window_wider_by(1), caught=False),
    Mutation(name="a window narrower by one", family="gpt_oss", code=_window_wider_by(-1),
             caught=False),
    Mutation(name="chunks longer by one", family="llama4", code=_window_wider_by(1), caught=False),
    Mutation(name="sinks left out", family="gpt_oss", code=_without_sinks, caught=False),
    Mutation(name="the state before a chunk forgotten", family="qwen3_next",
             code=_states(_state_before_run_forgotten), caught=False),
    Mutation(name="states kept at the boundary before", family="qwen3_next",
             code=_states(_states_kept_one_early), caught=False),
    Mutation(name="only the last state of a step kept", family="qwen3_next",
             code=_states(_only_last_state_kept), caught=False),
    Mutation(name="groups that share their keys", family="gpt_oss", code=_groups_share_keys,
             caught=False),
    Mutation(name="keys without what came before", family="gemma3", code=_key_without_parent,
             caught=False),
    Mutation(name="groups loaded into each other's blocks", family="gemma3",
             code=_loads_into(_next_groups_blocks), caught=False),
    Mutation(name="a window loaded backwards", family="gpt_oss", code=_loads_into(_backwards),
             caught=False),
)  # fmt: skip
