"""The prefix index, fed by the reference engine's own events, is what the engine holds."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache

import pytest
from tests.support.reference_options import sized
from tests.support.tiny_llama import tiny_model

from commutator.contract.block import BlockRemoved, EventBatch, KvEvent
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.routing import WorkerRank
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex
from commutator_reference.engine import ReferenceEngine

BLOCK = 4
SALTS = (None, "tenant")

load_tiny = cache(tiny_model)


class Watched:
    """A small engine, so that blocks are evicted, and the index of its events."""

    def __init__(self) -> None:
        self.index = PrefixIndex(BLOCK)
        options = sized(
            num_blocks=16, block_size=BLOCK, max_running_requests=4, max_tokens_per_step=32
        )
        self.engine = ReferenceEngine(load_tiny(), *options, on_kv_events=self._take)
        self.evicted = 0
        self._asked = 0

    def _take(self, events: Iterable[KvEvent]) -> None:
        """Events as they are sent between processes."""
        for event in decode_batch(
            encode_batch(EventBatch(timestamp_s=0.0, events=tuple(events)))
        ).events:
            self.index.apply("w", event)
            self.evicted += isinstance(event, BlockRemoved)

    def expected(self, prompt: list[int], salt: str | None) -> int:
        """Tokens that the index says the engine will find; the last one is always computed."""
        hashes = sequence_hashes(prompt, BLOCK, cache_salt=salt)
        held = self.index.match(hashes).get(WorkerRank("w", 0))
        tokens = 0 if held is None else held.device * BLOCK
        return min(tokens, (len(prompt) - 1) // BLOCK * BLOCK)

    def found(self, prompt: list[int], salt: str | None) -> int:
        """Cached tokens that the engine reports."""
        sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
        self._asked += 1
        self.engine.submit(
            self._asked,
            GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling, cache_salt=salt),
        )
        cached: list[int] = []
        while self.engine.load().running + self.engine.load().waiting:
            said = [delta.cached_tokens for _, delta in self.engine.step()]
            cached += [tokens for tokens in said if tokens is not None]
        (tokens,) = cached
        return tokens


@pytest.mark.proves(
    "reference", "KV events: the index is what the server holds", how="real engine on CPU"
)
def test_every_prompt_finds_what_the_index_says() -> None:
    rng, watched = random.Random(1), Watched()
    hits = 0
    for turn in range(30):
        beginning = [10 + rng.randrange(4)] * (BLOCK * rng.randrange(1, 6))
        prompt = [*beginning, *(rng.randrange(5, 90) for _ in range(rng.randrange(1, 12)))]
        salt = rng.choice(SALTS)
        expected = watched.expected(prompt, salt)
        assert watched.found(prompt, salt) == expected
        hits += expected > 0
        if turn == 20:
            watched.engine.reset_prefix_cache()
            watched.engine.step()
            assert watched.expected(prompt, salt) == 0
    assert hits > 5
    assert watched.evicted > 10
