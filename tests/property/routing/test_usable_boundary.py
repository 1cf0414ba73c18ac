"""How much of a prompt an index counts on, beside a count token by token that shares no code."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from commutator.contract.block import BlockRemoved, BlockStored
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex

SIZE = 4
MOST = 14
"""Blocks of ``SIZE`` tokens in a prompt."""


@frozen
class Layers:
    kind: str
    window: int = 0

    def reads(self, token: int) -> set[int]:
        """The tokens whose KV, or the state after them, ``token`` is computed from."""
        before = set(range(token))
        if self.kind == "sliding":
            return {each for each in before if token - each < self.window}
        if self.kind == "chunked":
            return {each for each in before if each // self.window == token // self.window}
        return {token - 1} & before


@frozen
class Worker:
    parts: int
    """Of our blocks in the engine's."""
    full: int
    """Tokens of the prompt that full attention has."""
    groups: Sequence[tuple[Layers, frozenset[int]]]
    """Other layers, and the engine's blocks that they have."""

    def boundary(self) -> int:
        """The most tokens after which the prompt can go on, in our blocks."""
        block = SIZE * self.parts
        for boundary in range(self.full // block * block, 0, -block):
            if all(
                {token // block for token in layers.reads(boundary)} <= held
                for layers, held in self.groups
            ):
                return boundary // SIZE
        return 0


@st.composite
def workers(draw: st.DrawFn) -> Worker:
    parts = draw(st.sampled_from([1, 1, 2, 3]))
    blocks = MOST // parts
    kinds = st.one_of(
        st.builds(Layers, st.just("sliding"), st.integers(1, 30)),
        st.builds(Layers, st.just("chunked"), st.integers(1, 30)),
        st.just(Layers("state")),
    )
    gone = st.frozensets(st.integers(0, blocks - 1), max_size=4)
    held = gone.map(lambda missing: frozenset(range(blocks)) - missing)
    groups = draw(st.lists(st.tuples(kinds, held), max_size=3))
    return Worker(parts, draw(st.integers(0, blocks)) * parts * SIZE, groups)


def tell(index: PrefixIndex, name: str, worker: Worker, tokens: list[int], order: int) -> None:
    """Events as engines write them; the groups' in any order beside the followed one's."""
    block = SIZE * worker.parts
    every = tuple(range(len(tokens) // block))
    full = every[: worker.full // block]

    def groups() -> None:
        for number, (layers, held) in enumerate(worker.groups):
            index.apply(
                name,
                BlockStored(
                    block_hashes=every,
                    parent_block_hash=None,
                    token_ids=(),
                    block_size=block,
                    group=number,
                    keeps_prefix=False,
                    window=layers.window,
                    chunked=layers.kind == "chunked",
                ),
            )
            gone = tuple(each for each in every if each not in held)
            index.apply(name, BlockRemoved(block_hashes=gone, group=number))

    if order:
        groups()
    if full:
        index.apply(
            name,
            BlockStored(
                block_hashes=full,
                parent_block_hash=None,
                token_ids=tuple(tokens[: len(full) * block]),
                block_size=block,
                group=9,
            ),
        )
    if not order:
        groups()


@settings(max_examples=200)
@given(st.lists(st.tuples(workers(), st.integers(0, 1)), min_size=1, max_size=4))
def test_the_index_counts_what_every_layer_can_go_on_from(
    told: list[tuple[Worker, int]],
) -> None:
    index = PrefixIndex(SIZE)
    tokens = list(range(MOST * SIZE))
    for number, (worker, order) in enumerate(told):
        tell(index, f"w{number}", worker, tokens, order)
    hashes = sequence_hashes(tokens, SIZE)
    counted = {owner.worker_id: overlap.blocks for owner, overlap in index.match(hashes).items()}
    expected = {f"w{number}": worker.boundary() for number, (worker, _) in enumerate(told)}
    assert counted == {name: blocks for name, blocks in expected.items() if blocks}
    for number in range(len(told)):
        index.remove_worker(f"w{number}")
    assert index.statistics().blocks == 0
