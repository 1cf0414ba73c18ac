"""Starts a KV connector as TensorRT-LLM's executor does: its classes, ranks and options."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

from tests.support.trtllm import published
from tests.support.trtllm.kv_pool import BLOCK_TOKENS, KvPool

from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.tiers.setup import TierSetup, read_tiers

__all__ = ["CONNECTOR", "Connector", "llm_args"]

CONNECTOR = {
    "connector_module": "commutator_trtllm.kv_connector",
    "connector_scheduler_class": "CommutatorKvScheduler",
    "connector_worker_class": "CommutatorKvWorker",
}
T = TypeVar("T")


def llm_args(model: Path, ranks: int = 1) -> Any:
    """As ``TorchLlmArgs`` names them."""
    cache_config = {"tokens_per_block": BLOCK_TOKENS, "enable_block_reuse": True, "dtype": "auto"}
    return SimpleNamespace(
        model=str(model),
        revision=None,
        tokenizer=None,
        dtype="float16",
        tensor_parallel_size=ranks,
        context_parallel_size=1,
        kv_cache_config=SimpleNamespace(**cache_config, max_attention_window=None),
    )


class _Ranks:
    """A thread for each rank; ``mpi_allgather`` waits for all of them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._here = threading.local()
        self._barrier = threading.Barrier(count)
        self._words: list[Any] = [None] * count

    @contextmanager
    def imported(self) -> Iterator[None]:
        """The parts of ``tensorrt_llm`` that the connector imports at run time."""
        package, utils = ModuleType("tensorrt_llm"), ModuleType("tensorrt_llm._utils")
        package.__version__ = "1.0"  # type: ignore[attr-defined]
        utils.mpi_rank = lambda: self._here.rank  # type: ignore[attr-defined]
        utils.mpi_allgather = self._gather  # type: ignore[attr-defined]
        sys.modules.update({"tensorrt_llm": package, "tensorrt_llm._utils": utils})
        try:
            yield
        finally:
            del sys.modules["tensorrt_llm"], sys.modules["tensorrt_llm._utils"]

    def on_each(self, call: Callable[[int], T]) -> list[T]:
        def run(rank: int) -> T:
            self._here.rank = rank
            return call(rank)

        with ThreadPoolExecutor(self.count) as pool:
            return list(pool.map(run, range(self.count)))

    def _gather(self, word: Any) -> list[Any]:
        self._words[self._here.rank] = word
        self._barrier.wait(60)
        return list(self._words)


class Connector:
    """The scheduler and the workers of all ranks, made in the documented order."""

    def __init__(
        self,
        folder: Path,
        tiers: Sequence[Mapping[str, Any]],
        pools: Sequence[KvPool],
        *,
        grouped: bool,
        wrap: Callable[[TierSetup], TierSetup] = lambda setup: setup,
        **options: str,
    ) -> None:
        """``options``: of the environment. ``grouped``: by the second KV cache manager.

        ``wrap`` puts faults around each tier.
        """
        file = folder / "tiers.json"
        file.write_text(json.dumps({"tiers": list(tiers)}))
        (folder / "model").mkdir(exist_ok=True)
        self.args = llm_args(folder / "model", len(pools))
        ranks = _Ranks(len(pools))
        given = {"tiers": str(file), "worker": f"trtllm-{id(self)}", "wait_s": "60", **options}
        environment = {f"TLLM_COMMUTATOR_{name.upper()}": text for name, text in given.items()}
        module = published.connector
        tiered = partial(_tiers, wrap)
        with (
            ranks.imported(),
            patch.dict("os.environ", environment),
            patch.object(module, "KvConnector", tiered),
        ):
            worker_class = getattr(module, CONNECTOR["connector_worker_class"])
            scheduler_class = getattr(module, CONNECTOR["connector_scheduler_class"])
            with ThreadPoolExecutor(2) as both:
                made = both.submit(ranks.on_each, lambda _: worker_class(self.args))
                self.scheduler = both.submit(scheduler_class, self.args).result()
                self.workers = made.result()
            for worker in self.workers:
                assert worker.register_forward_pass_callable() is None
            ranks.on_each(lambda rank: _register(self.workers[rank], pools[rank], grouped))
            self.scheduler.wait_for_initialization()

    def close(self) -> None:
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()


def _tiers(
    wrap: Callable[[TierSetup], TierSetup], entries: str, *args: Any, worker_id: str
) -> KvConnector:
    setups = [wrap(setup) for setup in read_tiers(entries, worker_id)]
    return KvConnector(setups, *args, worker_id=worker_id)


def _register(worker: Any, pool: KvPool, grouped: bool) -> None:
    if grouped:
        worker.register_kv_cache_layout(pool.layout())
    else:
        worker.register_kv_caches(pool.tensor)
