"""The reference engine with storage tiers, driven step by step in this process."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Self

from attrs import evolve
from tests.support.kv_integrity import check_connector
from tests.support.reference_integrity import check_engine
from tests.support.reference_options import Sized

from commutator.contract.block import CacheIdentity, KvEvent
from commutator.contract.request import FinishReason, GenerateRequest, SamplingParams, TokenDelta
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.tiers.setup import TierSetup
from commutator_reference.decoder import DecoderModel
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import LlamaModel

__all__ = ["TieredEngine"]

IDENTITY = CacheIdentity(
    model="tiny", weights="0", tokenizer="0", dtype="float32", layout="test", block_size=0
)


class TieredEngine:
    """Checks the block accounting at every step."""

    def __init__(
        self, model: LlamaModel | DecoderModel, tiers: Sequence[TierSetup], options: Sized
    ) -> None:
        self.events: list[KvEvent] = []
        self.engine = ReferenceEngine(model, *options, on_kv_events=self.events.extend)
        self.said: dict[int, list[TokenDelta]] = {}
        identity = evolve(IDENTITY, block_size=self.engine.block_size)
        self.connector = KvConnector(
            tiers,
            self.engine.arena.block_arena,
            identity,
            worker_id="engine",
            groups=self.engine.arena.groups,
            reports_evictions=True,
            wake=self.engine.wake,
        )
        self.connector.start()
        self.engine.use_tiers(self.connector)

    def submit(self, key: int, prompt: Sequence[int], new_tokens: int) -> None:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        self.engine.submit(
            key, GenerateRequest(request_id=str(key), token_ids=list(prompt), sampling=sampling)
        )

    def step(self) -> None:
        for key, delta in self.engine.step():
            self.said.setdefault(key, []).append(delta)
        check_engine(self.engine)
        check_connector(self.connector)
        if not self.engine.computes:
            time.sleep(0.001)

    def until_ended(self, keys: Iterable[int], timeout_s: float = 60.0) -> None:
        """Step until these requests are answered."""
        deadline_s = time.monotonic() + timeout_s
        while not all(self.ended(key) for key in keys):
            assert time.monotonic() < deadline_s, "the engine does not answer"
            self.step()

    def until_settled(self, timeout_s: float = 20.0) -> None:
        """Step until no block is held or being transferred."""
        deadline_s = time.monotonic() + timeout_s
        while not (self.connector.idle and not self.engine.load().kv_used_blocks):
            assert time.monotonic() < deadline_s, "blocks do not come back"
            self.step()
        self.step()

    def answers(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, *, first_key: int = 0, at_once: int
    ) -> list[list[int]]:
        """Greedy tokens of each prompt, ``at_once`` of them running or waiting together."""
        keys = range(first_key, first_key + len(prompts))
        waiting, live = list(keys), set[int]()
        deadline_s = time.monotonic() + 600
        while waiting or live:
            assert time.monotonic() < deadline_s, "the engine does not answer"
            while waiting and len(live) < at_once:
                key = waiting.pop(0)
                self.submit(key, prompts[key - first_key], new_tokens)
                live.add(key)
            self.step()
            live = {key for key in live if not self.ended(key)}
        return [self.tokens(key) for key in keys]

    def ended(self, key: int) -> bool:
        deltas = self.said.get(key)
        return bool(deltas) and deltas[-1].finish_reason is not None  # type: ignore[index]

    def tokens(self, key: int) -> list[int]:
        """The tokens of the answer. Raises AssertionError when the request failed."""
        deltas = self.said[key]
        assert deltas[-1].finish_reason is not FinishReason.ERROR, deltas[-1].error
        return [token for delta in deltas for token in delta.token_ids]

    def loaded(self) -> dict[str, int]:
        """Number of blocks loaded from each tier."""
        tiers = self.connector.statistics().tiers
        return {tier.name: tier.loads.get("loaded", 0) for tier in tiers}

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
