"""Blocks in several pieces: every byte is in one piece of one block, whatever the layout."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)
from tests.support.foreign_engine import TIMEOUT_S, ForeignEngine, dram, prompt
from tests.support.kv_integrity import check_connector

from commutator.contract.tier import Memory, Span
from commutator_engine_kit.kv.arena import BlockPart, ScatteredArena


@st.composite
def arenas(draw: st.DrawFn) -> ScatteredArena:
    """Tensors one after another, each [blocks, parts] or [parts, blocks], perhaps padded."""
    count = draw(st.integers(1, 5))
    parts: list[BlockPart] = []
    address = draw(st.integers(0, 100))
    for _ in range(draw(st.integers(1, 4))):
        sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
        if draw(st.booleans()):
            stride = sum(sizes) + draw(st.integers(0, 4))
            for size in sizes:
                parts.append(BlockPart(address=address, size_bytes=size, stride_bytes=stride))
                address += size
            address += stride * count
        else:
            for size in sizes:
                parts.append(BlockPart(address=address, size_bytes=size, stride_bytes=size))
                address += size * count
    return ScatteredArena(memory=Memory.DRAM, parts=tuple(parts), count=count)


def _bytes(span: Span) -> range:
    return range(span.address, span.address + span.size_bytes)


@given(arenas())
def test_pieces_are_whole_disjoint_and_registered(arena: ScatteredArena) -> None:
    seen: set[int] = set()
    registered = [byte for region in arena.regions for byte in _bytes(region.span)]
    assert len(registered) == len(set(registered)), "a byte is registered twice"
    for block in range(arena.count):
        pieces = arena.pieces(arena.span(block))
        assert sum(piece.size_bytes for piece in pieces) == arena.block_bytes
        for piece in pieces:
            assert seen.isdisjoint(_bytes(piece)), "two blocks share a byte"
            seen.update(_bytes(piece))
    assert seen <= set(registered)


class Embedded(RuleBasedStateMachine):
    """Chains are stored, forgotten and loaded; what is loaded is right, and blocks come back."""

    chains: Bundle[list[int]] = Bundle("chains")

    def __init__(self) -> None:
        super().__init__()
        self.engine = ForeignEngine(dram("32KB")).__enter__()

    @rule(target=chains, number=st.integers(0, 5), blocks=st.integers(1, 8))
    def stored(self, number: int, blocks: int) -> list[int]:
        tokens = prompt(number, blocks)
        self.engine.store(tokens)
        return tokens

    @rule(tokens=chains)
    def loaded(self, tokens: list[int]) -> None:
        self.engine.load(self.engine.connector.lookups.keys(tokens))

    @rule(tokens=chains, data=st.data())
    def loaded_in_part(self, tokens: list[int], data: st.DataObject) -> None:
        keys = self.engine.connector.lookups.keys(tokens)
        plan = self.engine.plan(keys)
        if not plan.blocks:
            return
        skip = data.draw(st.integers(0, plan.blocks - 1))
        count = data.draw(st.integers(1, plan.blocks - skip))
        good = self.engine.connector.loads.onboard(plan, range(count), skip=skip).result(TIMEOUT_S)
        for block, loaded in enumerate(good):
            assert not loaded or self.engine.holds(block, keys[skip + block])

    @rule(tokens=chains)
    def dropped(self, tokens: list[int]) -> None:
        self.engine.connector.loads.cancel(
            self.engine.plan(self.engine.connector.lookups.keys(tokens))
        )

    @rule(tokens=chains)
    def dropped_while_it_runs(self, tokens: list[int]) -> None:
        plan = self.engine.plan(self.engine.connector.lookups.keys(tokens))
        if plan.blocks:
            loading = self.engine.connector.loads.onboard(plan, range(plan.blocks))
            self.engine.connector.loads.cancel(plan)
            assert len(loading.result(TIMEOUT_S)) == plan.blocks

    @rule()
    def reset(self) -> None:
        self.engine.connector.stores.evict(reason="reset")

    @invariant()
    def books_balance(self) -> None:
        check_connector(self.engine.connector)

    def teardown(self) -> None:
        self.engine.__exit__()


def test_embedded_tiers_hold_what_they_were_given() -> None:
    run_state_machine_as_test(
        Embedded,
        settings=settings(max_examples=10, stateful_step_count=20, deadline=None),
    )
