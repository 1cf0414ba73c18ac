"""Answers questions about Dynamo's router, one JSON line each; runs in the peer's environment.

Started by ``bench.peers``; imports nothing but the standard library and the peer.
"""

from __future__ import annotations

import json
import os
import sys
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ.setdefault("DYN_LOG", "off")

from dynamo.llm import (
    RadixTree,
    compute_block_hash_for_seq,
)

Scores = list[list[int]]


def event_bytes(event: dict[str, Any]) -> bytes:
    return json.dumps(event).encode()


def scores(tree: Any, local_hashes: list[int]) -> Scores:
    """[worker, rank, blocks] of each worker that holds something."""
    found = tree.find_matches(local_hashes).scores
    return sorted([worker, rank, blocks] for (worker, rank), blocks in found.items())


def matched(tree: Any, local_hashes: list[int]) -> object:
    return tree.find_matches(local_hashes).scores


def hash_blocks(question: dict[str, Any]) -> list[int]:
    hashes: list[int] = compute_block_hash_for_seq(
        question["token_ids"], question["block_size"], lora_name=question.get("lora_name")
    )
    return hashes


def run(question: dict[str, Any]) -> dict[str, Any]:
    """Apply steps to a fresh tree, in order; answers the matches and the refused steps."""
    tree = RadixTree()
    matches: list[Scores] = []
    refused: list[int] = []
    for number, step in enumerate(question["steps"]):
        if "match" in step:
            matches.append(scores(tree, step["match"]))
        elif "remove_worker" in step:
            tree.remove_worker(step["remove_worker"])
        else:
            try:
                tree.apply_event(step["worker"], event_bytes(step["event"]))
            except Exception:  # noqa: BLE001 - the binding raises its own and plain ones
                refused.append(number)
    return {"matches": matches, "refused": refused}


def measure(question: dict[str, Any]) -> dict[str, float]:
    """Microseconds: hashing, applying one stored event (and removing it), and matching."""
    token_ids, block_size = question["token_ids"], question["block_size"]
    hashes = compute_block_hash_for_seq(token_ids, block_size)
    result = {"hash": best_us(lambda: compute_block_hash_for_seq(token_ids, block_size))}
    stored = event_bytes(question["stored"])
    removed = event_bytes(question["removed"])
    tree = RadixTree()
    tree.apply_event(0, stored)

    def store_and_remove() -> None:
        tree.apply_event(1, stored)
        tree.apply_event(1, removed)

    result["apply"] = best_us(store_and_remove)
    for workers in question["workers"]:
        tree = RadixTree()
        for worker in range(workers):
            tree.apply_event(worker, stored)
        assert len(scores(tree, hashes)) == workers
        result[f"match_{workers}"] = best_us(partial(matched, tree, hashes))
    return result


def best_us(call: Callable[[], object], number: int = 100, repeat: int = 15) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


ANSWERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "hash": hash_blocks,
    "run": run,
    "measure": measure,
}


def main() -> None:
    for line in sys.stdin:
        question = json.loads(line)
        answer = ANSWERS[question["ask"]](question)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
