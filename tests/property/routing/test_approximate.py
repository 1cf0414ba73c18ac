"""The guess equals a recount: what was routed within the time to live, the newest that fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.routing import WorkerRank
from commutator.routing.prefix_index.index import PrefixIndex
from commutator.routing.prefix_index.indexer import GuessedBlocks

TTL_S = 10.0
prompts = st.lists(st.integers(1, 12), min_size=1, max_size=6, unique=True)
steps = st.lists(st.tuples(st.sampled_from(["a", "b"]), prompts, st.floats(0, 6)), max_size=30)


@given(steps, st.integers(1, 10))
def test_equals_a_recount(plan: list[tuple[str, list[int], float]], capacity: int) -> None:
    index = PrefixIndex(16)
    blocks = GuessedBlocks(index, TTL_S)
    used: dict[str, dict[int, float]] = {"a": {}, "b": {}}
    now_s = 0.0
    for worker_id, prompt, wait_s in plan:
        now_s += wait_s
        blocks.expire(now_s)
        blocks.routed(WorkerRank(worker_id), prompt, capacity, now_s)
        mine = used[worker_id]
        for block in reversed(prompt):
            mine.pop(block, None)
            mine[block] = now_s
        for name, known in used.items():
            alive = {block: at for block, at in known.items() if at + TTL_S > now_s}
            newest = list(alive)[-capacity:] if name == worker_id else list(alive)
            used[name] = {block: alive[block] for block in newest}
        for name, known in used.items():
            held = {block for block in range(1, 13) if index.holds(name, block)}
            assert held == set(known)
    blocks.forget("a")
    assert not any(index.holds("a", block) for block in range(1, 13))


def test_many_blocks_expire_in_several_steps() -> None:
    index = PrefixIndex(16)
    blocks = GuessedBlocks(index, TTL_S)
    for worker_id in ("a", "b"):
        blocks.routed(WorkerRank(worker_id), range(50), None, 0.0)
    left = []
    while index.statistics().blocks:
        blocks.expire(TTL_S, most=20)
        left.append(sum(held[0] for held in index.blocks_by_worker().values()))
    assert left == [80, 60, 40, 20, 0]
    blocks.routed(WorkerRank("a"), range(3), None, TTL_S)
    blocks.expire(2 * TTL_S)
    assert not index.statistics().blocks
