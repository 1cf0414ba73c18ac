"""What routes the requests of one model, assembled from the configuration."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from attrs import frozen

from commutator.config.model import Config
from commutator.config.tunable import with_values
from commutator.contract.disagg import DisaggPolicy, DisaggregationConfig
from commutator.contract.event_bus import EventBus
from commutator.contract.fairness import FairnessPolicy
from commutator.contract.routing import BusyConfig, RouterConfig
from commutator.contract.tuning import Trial
from commutator.fairness import Fifo, Guarded, Weighted
from commutator.plugins import PluginHost
from commutator.routing.disagg.prefill_pool import PrefillPool, WorkerCompatibility
from commutator.routing.load import InFlightLoad
from commutator.routing.placement import Placer
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import Arms, ModelRouter
from commutator.routing.workers import LiveWorkers

PolicyT = TypeVar("PolicyT")


class TunedPolicy(Generic[PolicyT]):
    """Makes the policies of one section, and keeps those, with their state, that stay in use."""

    def __init__(
        self,
        arms: Arms[PolicyT],
        make: Callable[[Any], PolicyT],
        section: Callable[[Config], Any],
        config: Config,
    ) -> None:
        """``section`` finds its options in a configuration; ``arms`` has those of ``config``."""
        self._arms = arms
        self._make = make
        self._section = section
        self._made: list[tuple[Any, PolicyT]] = [(section(config), arms.policy)]

    def prepare(self, config: Config, other: Config, trial: Trial | None) -> Callable[[], None]:
        """What is to be called to use other options; those of ``other`` where ``trial`` says so.

        Raises what a policy raises that is made.
        """
        options, others = self._section(config), self._section(other)
        policy = self._of(options)
        made, tried = [(options, policy)], None
        if others != options:
            tried = self._of(others)
            made.append((others, tried))

        def use() -> None:
            self._made = made
            self._arms.use(policy, tried, trial)

        return use

    def _of(self, options: Any) -> PolicyT:
        made = (policy for known, policy in self._made if known == options)
        return next(made, None) or self._make(options)


def tune(
    policies: Iterable[TunedPolicy[Any]],
    config: Config,
    values: Mapping[str, float],
    trial: Trial | None,
) -> None:
    """Have ``policies`` use these values of the tunable options of ``config``, and the trial's.

    Raises ValueError for what may not be set, see ``with_values``, or what a policy raises that is
    made with a value; then nothing has changed.
    """
    config = with_values(config, values)
    other = config if trial is None else with_values(config, {trial.option: trial.value})
    prepared = [one.prepare(config, other, trial) for one in policies]
    for use in prepared:
        use()


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
    tuned: Sequence[TunedPolicy[Any]]

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
        self.router.forget(worker_id)
        if self.prefill is not None:
            self.prefill.router.forget(worker_id)


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
    kept: Sequence[KvIndexer] = (),
) -> ModelRouting:
    """``on_waiting`` is called with 1 when a request begins to wait for a worker, then -1.

    ``bus`` carries the KV events; the caller closes it. ``kept``: indexers of the model's workers,
    used where their options agree.
    """
    from_zero = config.scales_from_zero

    def make_placer(config: RouterConfig, shared: KvIndexer | None, *, prefill: bool) -> Placer:
        """``shared``: another router's indexer of the same workers, used if its options agree."""
        policy = host.routers.kinds[config.kind].thing(config)
        indexer = None
        if policy.uses_overlap:
            known = (*(() if shared is None else (shared,)), *kept)
            serving = (one for one in known if one.serves(config))
            indexer = next(serving, None) or KvIndexer(config, bus=bus)
        router = ModelRouter(policy, indexer, load, rng, config.block_size)
        return Placer(
            model,
            router,
            workers,
            load,
            config.busy,
            on_waiting=on_waiting,
            fairness=_fairness(config.busy, host),
            for_first=from_zero and not prefill,
            prefill=prefill,
        )

    placer = make_placer(config.router, None, prefill=False)
    pool = None
    if (disagg := config.disaggregation) is not None:
        policy = host.disaggs.kinds[disagg.kind].thing(disagg)
        prefill = make_placer(disagg.router, placer.router.indexer, prefill=True)
        pool = PrefillPool(disagg, policy, prefill, compatibility, host)
    tuned = tuned_policies(
        config, host, placer.router, *(() if pool is None else (pool.arms, pool.router))
    )
    return ModelRouting(placer.router, placer, pool, workers, load, host, tuned)


def tuned_policies(
    config: Config,
    host: PluginHost,
    router: ModelRouter,
    disagg: Arms[DisaggPolicy] | None = None,
    prefill: ModelRouter | None = None,
) -> list[TunedPolicy[Any]]:
    """The policies of one model whose options may be tuned, made of ``config``."""
    make = host.routers.kinds[config.router.kind].thing
    tuned = [TunedPolicy[Any](router.arms, make, lambda one: one.router, config)]
    if disagg is not None and prefill is not None:
        section = _disaggregation(config)
        make_disagg = host.disaggs.kinds[section.kind].thing
        make = host.routers.kinds[section.router.kind].thing
        tuned += [
            TunedPolicy(disagg, make_disagg, _disaggregation, config),
            TunedPolicy(prefill.arms, make, lambda one: _disaggregation(one).router, config),
        ]
    return tuned


def _disaggregation(config: Config) -> DisaggregationConfig:
    assert config.disaggregation is not None
    return config.disaggregation


_DEFAULT_FAIRNESS = "weighted"


def _fairness(busy: BusyConfig, host: PluginHost) -> FairnessPolicy | None:
    """The policy of one queue; None where no request ever waits."""
    if not busy.enabled:
        return None
    config = busy.fairness
    kind = host.fairness.kinds[_DEFAULT_FAIRNESS if config is None else config.kind]
    policy = kind.thing(config or kind.config_class(kind=kind.name))
    # The guard doubles the calls of each request, and core's own policies do not fail.
    return policy if isinstance(policy, Fifo | Weighted) else Guarded(policy)
