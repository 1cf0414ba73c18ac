"""One model's workers: those that answer its requests, and those that only prefill for them."""

from __future__ import annotations

import random
from collections.abc import Callable

from attrs import frozen

from commutator.config.model import Config, DisaggregationConfig, RouterConfig
from commutator.plugins import PluginHost
from commutator.routing.cache_view import CacheView
from commutator.routing.disagg_asker import DisaggAsker
from commutator.routing.handover_pairs import HandoverPairs
from commutator.routing.load import InFlightLoad
from commutator.routing.placer import Placer
from commutator.routing.pool import ModelPool
from commutator.routing.prefill_pool import PrefillPool
from commutator.routing.view import WorkerView

__all__ = ["ModelWorkers", "ModelWorkersFactory"]


@frozen(eq=False)
class ModelWorkers:
    """What routes the requests for one model."""

    pool: ModelPool[CacheView]
    placer: Placer
    prefill: PrefillPool | None = None
    """None when prefill is never apart."""

    @property
    def cache(self) -> CacheView | None:
        """What the workers that answer are known to hold; None when nobody asks."""
        return self.pool.cache

    def caches(self) -> list[CacheView]:
        """Each view once of what the workers hold; every worker is in all of them."""
        apart = None if self.prefill is None else self.prefill.pool.cache
        return list(dict.fromkeys(cache for cache in (self.cache, apart) if cache is not None))

    def wake(self) -> None:
        """Some worker may have become free."""
        self.placer.wake()
        if self.prefill is not None:
            self.prefill.placer.wake()

    def forget(self, worker_id: str) -> None:
        """The policies keep nothing of the worker."""
        self.pool.policy.forget(worker_id)
        if self.prefill is not None:
            self.prefill.pool.policy.forget(worker_id)


@frozen(eq=False)
class ModelWorkersFactory:
    """Makes those of each model out of what all models share."""

    config: Config
    host: PluginHost
    view: WorkerView
    load: InFlightLoad
    pairs: HandoverPairs
    rng: random.Random
    waits: Callable[[int], None]
    """Hears 1 when a request begins to wait for a worker, -1 when that ends."""

    def make(self, model: str) -> ModelWorkers:
        router, apart = self.config.router, self.config.disaggregation
        pool = self._pool(router)
        placer = Placer(model, pool, self.view, self.load, router.busy, self.waits)
        prefill = None if apart is None else self._prefill_pool(model, apart, pool.cache)
        return ModelWorkers(pool, placer, prefill)

    def _pool(self, config: RouterConfig, shared: CacheView | None = None) -> ModelPool[CacheView]:
        """``shared``: another pool's view of the same workers' caches, used if it serves."""
        policy = self.host.routers.kinds[config.kind].thing(config)
        cache = None
        if policy.uses_overlap:
            cache = shared if shared and shared.serves(config) else CacheView(config)
        return ModelPool(policy, cache, self.load, self.rng, config.block_size)

    def _prefill_pool(
        self, model: str, config: DisaggregationConfig, shared: CacheView | None
    ) -> PrefillPool:
        view, load = self.view, self.load
        pool = self._pool(config.router, shared)
        placer = Placer(model, pool, view, load, config.router.busy, self.waits, prefill=True)
        asker = DisaggAsker(self.host.disaggs.kinds[config.kind].thing(config))
        return PrefillPool(model, config, asker, pool, placer, view, load, self.pairs)
