"""What routes the requests of one model, assembled from the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable

from attrs import frozen

from commutator.config.model import Config
from commutator.contract.event_bus import EventBus
from commutator.contract.fairness import FairnessPolicy
from commutator.contract.routing import BusyConfig, RouterConfig
from commutator.fairness.guarded import Guarded
from commutator.plugins import PluginHost
from commutator.routing.disagg.prefill_pool import PrefillPool, WorkerCompatibility
from commutator.routing.load import InFlightLoad
from commutator.routing.placement import Placer
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import ModelRouter
from commutator.routing.workers import LiveWorkers

__all__ = [
    "ModelRouting",
    "model_routing",
]


@frozen(eq=False)
class ModelRouting:
    """The routers and queues of one model, and the parts that all models share."""

    router: ModelRouter
    placer: Placer
    prefill: PrefillPool | None
    """None without `disaggregation`."""
    workers: LiveWorkers
    load: InFlightLoad
    host: PluginHost

    @property
    def indexer(self) -> KvIndexer | None:
        """The index of the workers that decode; None when the policy does not use overlaps."""
        return self.router.indexer

    def indexers(self) -> list[KvIndexer]:
        """Each indexer once; every worker of the model is in all of them."""
        prefill = None if self.prefill is None else self.prefill.router.indexer
        return list(dict.fromkeys(one for one in (self.indexer, prefill) if one is not None))

    def wake(self) -> None:
        """A worker may have become free."""
        self.placer.wake()
        if self.prefill is not None:
            self.prefill.placer.wake()

    def forget(self, worker_id: str) -> None:
        """Make the routing policies drop what they know about a worker."""
        self.router.policy.forget(worker_id)
        if self.prefill is not None:
            self.prefill.router.policy.forget(worker_id)


def model_routing(
    model: str,
    config: Config,
    host: PluginHost,
    workers: LiveWorkers,
    load: InFlightLoad,
    compatibility: WorkerCompatibility,
    rng: random.Random,
    on_waiting: Callable[[int], None],
    bus: EventBus,
) -> ModelRouting:
    """``on_waiting`` is called with 1 when a request begins to wait for a worker, then -1.

    ``bus`` carries the KV events; the caller closes it.
    """
    from_zero = config.scales_from_zero

    def make_placer(config: RouterConfig, shared: KvIndexer | None, *, prefill: bool) -> Placer:
        """``shared``: another router's indexer of the same workers, used if its options agree."""
        policy = host.routers.kinds[config.kind].thing(config)
        indexer = None
        if policy.uses_overlap:
            indexer = shared if shared and shared.serves(config) else KvIndexer(config, bus=bus)
        router = ModelRouter(policy, indexer, load, rng, config.block_size)
        return Placer(
            model,
            router,
            workers,
            load,
            config.busy,
            on_waiting,
            prefill=prefill,
            fairness=_fairness(config.busy, host),
            waits_for_first=from_zero and not prefill,
        )

    placer = make_placer(config.router, None, prefill=False)
    pool = None
    if (disagg := config.disaggregation) is not None:
        policy = host.disaggs.kinds[disagg.kind].thing(disagg)
        prefill = make_placer(disagg.router, placer.router.indexer, prefill=True)
        pool = PrefillPool(disagg, policy, prefill, compatibility, host)
    return ModelRouting(placer.router, placer, pool, workers, load, host)


_DEFAULT_FAIRNESS = "weighted"


def _fairness(busy: BusyConfig, host: PluginHost) -> FairnessPolicy | None:
    """The policy of one queue; None where no request ever waits."""
    if not busy.enabled:
        return None
    config = busy.fairness
    kind = host.fairness.kinds[_DEFAULT_FAIRNESS if config is None else config.kind]
    return Guarded(kind.thing(config or kind.config_class(kind=kind.name)))
