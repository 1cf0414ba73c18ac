"""The heart of KV-aware routing against Dynamo's, through the Python binding that it offers.

Both sides get the same prompt of 9,000 tokens (562 blocks of 16) and the same events, in one run,
in turns; the least of many times counts. The peer measures itself in its own environment, so
nothing of the conversation with it is counted.
"""

from __future__ import annotations

import random
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import frozen

from bench.peers import DynamoPeer
from bench.result import Figure
from commutator.contract.block import BlockRemoved, BlockStored, EventBatch
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import local_block_hashes, sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex

BLOCK_SIZE = 16
TOKENS = 9_000
WORKERS = (8, 64)
ROUNDS = 3
SAME_WORK = {"hash", "match_8", "match_64"}
"""What the binding does too: its tree walks local hashes, and nothing of it chains them."""

Row = dict[str, Any]


@frozen
class Prompt:
    """What both sides are given."""

    token_ids: list[int]
    local: list[int]
    sequence: list[int]
    names: list[int]
    """The engine's own block hashes."""

    @classmethod
    def random(cls, tokens: int = TOKENS) -> Prompt:
        chance = random.Random(1)
        token_ids = [chance.randrange(150_000) for _ in range(tokens)]
        sequence = sequence_hashes(token_ids, BLOCK_SIZE)
        local = local_block_hashes(token_ids, BLOCK_SIZE)
        return cls(token_ids, local, sequence, [chance.getrandbits(63) for _ in local])

    @property
    def stored(self) -> BlockStored:
        tokens = tuple(self.token_ids[: len(self.local) * BLOCK_SIZE])
        return BlockStored(
            block_hashes=tuple(self.names),
            parent_block_hash=None,
            token_ids=tokens,
            block_size=BLOCK_SIZE,
        )

    @property
    def removed(self) -> BlockRemoved:
        return BlockRemoved(block_hashes=tuple(self.names))

    def index(self, workers: int) -> PrefixIndex:
        """So many workers hold the whole prompt."""
        index = PrefixIndex(BLOCK_SIZE)
        for worker in range(workers):
            index.apply(f"worker-{worker}", self.stored)
        return index


def hashing(prompt: Prompt) -> dict[str, float]:
    return {
        "hash": _best_us(lambda: local_block_hashes(prompt.token_ids, BLOCK_SIZE)),
        "hash_chain": _best_us(lambda: sequence_hashes(prompt.token_ids, BLOCK_SIZE)),
    }


def applying(prompt: Prompt) -> dict[str, float]:
    """Events that store and remove the prompt's blocks, while another worker holds them."""
    index = prompt.index(1)
    bodies = [
        encode_batch(EventBatch(timestamp_s=0.0, events=(event,)))
        for event in (prompt.stored, prompt.removed)
    ]

    def from_the_wire() -> None:
        for body in bodies:
            for event in decode_batch(body).events:
                index.apply("other", event)

    def hashed() -> None:
        index.store("other", prompt.sequence)
        index.remove("other", prompt.sequence)

    return {"apply_wire": _best_us(from_the_wire, 20), "apply": _best_us(hashed, 20)}


def matching(prompt: Prompt) -> dict[str, float]:
    found: dict[str, float] = {}
    for workers in WORKERS:
        index = prompt.index(workers)
        assert len(index.match(prompt.sequence)) == workers
        found[f"match_{workers}"] = _best_us(partial(index.match, prompt.sequence))
        found[f"hash_match_{workers}"] = _best_us(partial(_hash_and_match, index, prompt))
    return found


def _hash_and_match(index: PrefixIndex, prompt: Prompt) -> object:
    return index.match(sequence_hashes(prompt.token_ids, BLOCK_SIZE))


def rows() -> list[Row]:
    """Name, microseconds of ours and of the peer's, and how many times faster ours is."""
    prompt = Prompt.random()
    ours: dict[str, float] = {}
    theirs: dict[str, float] = {}
    with DynamoPeer() as peer:
        for _ in range(ROUNDS):
            _keep_least(ours, hashing(prompt) | applying(prompt) | matching(prompt))
            _keep_least(theirs, _ask(peer, prompt))
    theirs["hash_chain"] = theirs["hash"]  # the tree has no chain: it walks the local hashes
    theirs["apply_wire"] = theirs["hash"] + theirs["apply"]  # its events carry hashes
    for workers in WORKERS:
        theirs[f"hash_match_{workers}"] = theirs["hash"] + theirs[f"match_{workers}"]
    return [
        {
            "name": text,
            "ours_us": ours[name],
            "peer_us": theirs[name],
            "ratio": theirs[name] / ours[name],
            "aim": "1" if name in SAME_WORK else "",
        }
        for name, text in _names(len(prompt.local)).items()
    ]


def run() -> list[Figure]:
    return [
        Figure(
            scenario="routing",
            what=row["name"],
            ours=row["ours_us"],
            other=row["peer_us"],
            unit="us",
            other_name="Dynamo 1.6.1",
            aim=row["aim"],
            higher_is_better=False,
        )
        for row in rows()
    ]


def _names(blocks: int) -> dict[str, str]:
    names = {
        "hash": f"hash {TOKENS:,} tokens",
        "hash_chain": f"hash {TOKENS:,} tokens and chain them (the peer: hash)",
        "apply": f"store and remove {blocks} blocks, hashes known",
        "apply_wire": f"decode, hash, store and remove {blocks} blocks",
    }
    for workers in WORKERS:
        names[f"match_{workers}"] = f"match {blocks} blocks over {workers} workers"
        names[f"hash_match_{workers}"] = f"both for {TOKENS:,} tokens over {workers} workers"
    return names


def _ask(peer: DynamoPeer, prompt: Prompt) -> dict[str, float]:
    blocks = [
        {"block_hash": name, "tokens_hash": local_hash}
        for name, local_hash in zip(prompt.names, prompt.local, strict=True)
    ]
    stored = {"stored": {"parent_hash": None, "blocks": blocks}}
    removed = {"removed": {"block_hashes": prompt.names}}
    found: dict[str, float] = peer.ask(
        "measure",
        token_ids=prompt.token_ids,
        block_size=BLOCK_SIZE,
        workers=list(WORKERS),
        stored={"event_id": 1, "data": stored, "dp_rank": 0},
        removed={"event_id": 2, "data": removed, "dp_rank": 0},
    )
    return found


def _keep_least(least: dict[str, float], found: dict[str, float]) -> None:
    for name, value in found.items():
        least[name] = min(value, least.get(name, value))


def _best_us(call: Callable[[], object], number: int = 100, repeat: int = 15) -> float:
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6
