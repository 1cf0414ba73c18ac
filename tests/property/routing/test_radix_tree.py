"""The same event streams give the same overlap scores as Dynamo's RadixTree.

The tree treats a few streams differently from the engines they come from, and those are left out
here (the plain index has them): it refuses a block whose parent is unknown, while ours waits for
the parent; and it forgets what lies below a removed block, while the engine still has it. So an
orphan's parent never comes, and a removed block is stored again only after all below it are gone.
And the tree takes for granted that all engines name equal blocks alike, so it is given such names.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from attrs import define, field
from bench.peers import DynamoPeer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.property.routing.streams import (
    BLOCK_SIZE,
    Cleared,
    Path,
    Removed,
    Step,
    Stored,
    hashes_of,
    steps,
    tokens_of,
)

from commutator.contract.block import CacheLevel
from commutator.contract.routing import WorkerRank
from commutator.routing.prefix_index.hashing import local_block_hashes
from commutator.routing.prefix_index.index import PrefixIndex

EXAMPLES = 400
STEPS = 80
EVENTS_WANTED = 10_000


@define
class Admission:
    """Which steps of a random stream both sides read alike."""

    held: dict[WorkerRank, set[Path]] = field(factory=dict)
    orphans: dict[WorkerRank, set[Path]] = field(factory=dict)

    def admits(self, step: Step) -> bool:
        held = self.held.setdefault(step.member, set())
        orphans = self.orphans.setdefault(step.member, set())
        match step:
            case Stored():
                blocks = set(step.blocks)
                new = blocks - held
                if any(_ancestors(path) & new for path in (held | orphans) - blocks):
                    return False
                if step.start == 0 or step.path[: step.start] in held:
                    held |= blocks
                    orphans -= blocks
                elif held & blocks:
                    return False
                else:
                    orphans |= blocks
            case Removed():
                held -= set(step.blocks)
                orphans -= set(step.blocks)
            case Cleared():
                held.clear()
                orphans.clear()
        return True


def _ancestors(path: Path) -> set[Path]:
    return {path[:end] for end in range(1, len(path))}


def name_of(path: Path) -> int:
    return hashes_of(path)[-1] ^ 1


def question(step: Step) -> dict[str, Any]:
    """The step as the tree's binding reads it."""
    match step:
        case Stored():
            local = local_block_hashes(tokens_of(step.path), BLOCK_SIZE)[step.start :]
            parent = step.path[: step.start]
            blocks = [
                {"block_hash": name_of(block), "tokens_hash": tokens_hash}
                for block, tokens_hash in zip(step.blocks, local, strict=True)
            ]
            parent_hash = name_of(parent) if parent else None
            data: Any = {"stored": {"parent_hash": parent_hash, "blocks": blocks}}
        case Removed():
            hashes = [name_of(block) for block in step.blocks]
            data = {"removed": {"block_hashes": hashes}}
        case Cleared():
            data = "cleared"
    event = {"event_id": 1, "data": data, "dp_rank": step.member.rank}
    return {"worker": int(step.member.worker_id[1:]), "event": event}


def scores_of(index: PrefixIndex, prompt: Path) -> list[list[int]]:
    """As the peer answers: [worker, rank, blocks]."""
    matches = index.match(hashes_of(prompt))
    return sorted([int(m.worker_id[1:]), m.rank, found.device] for m, found in matches.items())


@pytest.mark.long
def test_scores_equal_the_radix_trees(dynamo: DynamoPeer) -> None:
    compared: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(stream=st.lists(steps([CacheLevel.DEVICE]), min_size=STEPS, max_size=STEPS))
    def compare(stream: list[Step]) -> None:
        index, admission = PrefixIndex(BLOCK_SIZE), Admission()
        asked: list[dict[str, Any]] = []
        ours: list[list[list[int]]] = []
        prompt: Path = (0,)
        for step in filter(admission.admits, stream):
            index.apply(step.member.worker_id, step.event(), step.member.rank)
            asked.append(question(step))
            prompt = step.path if isinstance(step, Stored) else prompt
            asked.append({"match": local_block_hashes(tokens_of(prompt), BLOCK_SIZE)})
            ours.append(scores_of(index, prompt))
        theirs = dynamo.ask("run", steps=asked)
        assert ours == theirs["matches"]
        compared["events"] += len(ours)
        compared["matches"] += sum(bool(scores) for scores in ours)
        compared["refused"] += len(theirs["refused"])

    compare()
    print(dict(compared))
    assert compared["events"] >= EVENTS_WANTED
    assert compared["matches"] >= EVENTS_WANTED // 2, "too few events came to anything"
    assert compared["events"] - compared["refused"] >= EVENTS_WANTED
