"""What every front door of a process is given: models, routing, limits and metrics."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import define, field

from commutator.auth.gate import Gate
from commutator.auth.rights import longest, may_use
from commutator.auth.unlimited import Unlimited
from commutator.config.load import Loaded
from commutator.contract.door import FrontendConfig
from commutator.contract.limiter import RequestLimiter
from commutator.contract.observer import Observer
from commutator.contract.operations import Operations
from commutator.contract.parser import Parser
from commutator.contract.principal import Principal
from commutator.contract.registry import Registry
from commutator.contract.response_store import ResponseStore
from commutator.contract.traffic import Traffic
from commutator.contract.worker import KvStatistics
from commutator.errors import RequestError
from commutator.frontend.demand import PlannerLink
from commutator.frontend.limits import ConcurrencyLimiter, LogprobBudget, TimeLimits
from commutator.frontend.request.preprocessor import Preprocessor
from commutator.frontend.work import WorkPool
from commutator.metrics.frontend import FrontendMetrics
from commutator.metrics.readings import Readings
from commutator.registry.unready import UnreadyWorker
from commutator.routing.dispatcher import Dispatcher
from commutator.tokenizer.text_model import TextModel
from commutator.trust import refused_connections

_PROBES_END_S = 60.0
"""Without a question whether it is ready, after which nobody is taken to wait for the answer."""


@define(kw_only=True)
class FrontendServices:
    """The parts of one front-door process."""

    config: FrontendConfig
    models: Mapping[str, TextModel]
    """By the name that clients give."""
    parsers: Mapping[str, Parser] = field(factory=dict)
    """By the same name, where the answers of the model are more than text."""
    dispatcher: Dispatcher
    limiter: ConcurrencyLimiter
    metrics: FrontendMetrics = field(init=False)
    """An observer, still to be added to the plugin host."""
    time_limits: TimeLimits = field(factory=TimeLimits)
    logprobs: LogprobBudget = field(init=False)
    """Of the answers that are being made."""
    work: WorkPool = field(factory=WorkPool)
    """Threads for what takes long."""
    preprocessors: Mapping[str, Preprocessor] = field(init=False)
    """By model."""
    gate: Gate = field(factory=Gate)
    """Tells who sends a request."""
    request_limiter: RequestLimiter = field(factory=Unlimited)
    """Counts requests against the limits of their principals."""
    observer: Observer = field(factory=Observer)
    """Learns of each request that was answered."""
    traffic: Traffic | None = None
    """Which model serves a request; None: the one that it names."""
    registry: Registry | None = None
    """Where workers are drained and get other roles; None: nowhere."""
    registry_address: str | None = None
    """ "HOST:PORT" of the registry, for people; None when it has no address."""
    loaded: Loaded | None = None
    """What the process serves by; None in tests of parts."""
    planner: PlannerLink | None = None
    """The way to the planner; None: the deployment has none."""
    refused: Mapping[str, int] = field(factory=dict)
    """Connections that the registry's process refused, by service."""
    unready: Sequence[UnreadyWorker] = ()
    """The workers that the supervisor starts, or cannot start."""
    response_stores: Mapping[str, Callable[[Any], ResponseStore | None]] = field(factory=dict)
    """What makes them, by kind."""
    operations: Sequence[Operations] = ()
    """What operators see and do on the doors, beside health, metrics and administration."""
    started_unix_s: int = field(factory=lambda: int(time.time()))
    leaving: bool = False
    """Set some time before ``draining``: requests are served, but no longer invited."""
    draining: bool = False
    """Set when the process is about to end."""
    probed_s: float = -math.inf
    """When a client last asked whether it is ready; of ``time.monotonic``."""

    def __attrs_post_init__(self) -> None:
        limiter, dispatcher, config = self.limiter, self.dispatcher, self.config
        self.logprobs = LogprobBudget(config.max_logprobs, config.max_concurrent_requests)
        self.metrics = FrontendMetrics(
            Readings(
                running=lambda: limiter.running,
                queued=lambda: limiter.waiting,
                load_peers=lambda: dispatcher.load.peers,
                registry_age_s=self._registry_age_s,
                models_ready=dispatcher.models_ready,
                workers=lambda: chain.from_iterable(dispatcher.statuses()),
                router_queues=lambda: {name: dispatcher.waiting(name) for name in self.models},
                prefill_queues=dispatcher.prefill_queues,
                prompt_cache_bytes=lambda: {
                    name: preprocessor.cache_bytes
                    for name, preprocessor in self.preprocessors.items()
                },
                events=dispatcher.worker_events,
                warnings=dispatcher.warnings,
                kv=lambda: dispatcher.poll.kv,
                transfers=lambda: dispatcher.poll.transfers,
                refused=lambda: {
                    **dispatcher.poll.refused,
                    "supervisor": self.refused,
                    "front door": refused_connections(),
                },
                planner=lambda: None if self.planner is None else self.planner.status,
            )
        )
        for name in self.models:
            self.metrics.model_served(name)
        self.preprocessors = {name: self.preprocessor(name) for name in self.models}

    def preprocessor(self, name: str) -> Preprocessor:
        """A new one for a model of ``models``, whose routing ``dispatcher`` knows."""
        return Preprocessor(
            name,
            self.models[name],
            self.config.prompt_cache_bytes,
            self.dispatcher.hashed_block_size(name),
            self.metrics,
            self.work,
        )

    def _registry_age_s(self) -> float:
        age_s = None if self.registry is None else self.registry.view_age_s()
        return math.nan if age_s is None else age_s

    def is_ready(self, model: str | None = None, *, probed: bool = True) -> bool:
        """Whether ``model`` can be served, by default every model, and goes on to be.

        ``probed``: a client asks, who is to notice when this front door leaves.
        """
        if probed:
            self.probed_s = time.monotonic()
        if self.leaving or self.draining:
            return False
        return self.dispatcher.ready() if model is None else self.dispatcher.models_ready()[model]

    def leave(self) -> bool:
        """Be not ready from now on; returns whether a client has asked within the last minute."""
        self.leaving = True
        return time.monotonic() - self.probed_s < _PROBES_END_S

    def unready_workers(self) -> Iterator[UnreadyWorker]:
        """``unready`` without those that have become ready since."""
        known = {one.worker_id for found in self.dispatcher.statuses() for one in found}
        return (one for one in self.unready if one.worker_id not in known)

    def problems(self) -> Iterator[str]:
        """What makes the run degraded, a line for people each."""
        ready = self.dispatcher.ready()
        models = () if ready else self.dispatcher.models_ready().items()
        unserved = [model for model, is_ready in models if not is_ready]
        yield from problems(unserved, self.unready_workers(), self.dispatcher.poll.kv)
        yield from self.dispatcher.policy_problems()

    def models_for(self, principal: Principal) -> list[str]:
        """The names of the models that the principal may use."""
        return [name for name in self.models if may_use(principal, name)]

    @property
    def aliases(self) -> Mapping[str, Sequence[str]]:
        """By name, the models that it may mean."""
        return {} if self.traffic is None else self.traffic.aliases

    def meant(self, name: str, principal: Principal) -> list[str]:
        """The models that a name stands for, of those that the principal may use."""
        mine = self.models_for(principal)
        return [one for one in self.aliases.get(name, (name,)) if one in mine]

    def names_for(self, principal: Principal) -> list[str]:
        """What the principal may ask for: the names of its models, and their aliases."""
        mine = self.models_for(principal)
        return mine + [one for one in self.aliases if one not in mine if self.meant(one, principal)]

    def text_model(self, name: str | None, principal: Principal) -> tuple[str, TextModel]:
        """(name, model); None means the only one of the principal. Raises RequestError.

        For a client's request ask its call, which knows aliases.
        """
        if name is None:
            mine = self.models_for(principal)
            if len(mine) != 1:
                raise RequestError(
                    f"model: required, because several are served: {', '.join(mine)}"
                    if mine
                    else f"model: {principal.name} may use none",
                    "model",
                    "missing_required_parameter",
                )
            name = mine[0]
        model = self.models.get(name)
        if model is None or not may_use(principal, name):
            known = ", ".join(self.names_for(principal)) or "none"
            raise RequestError(
                f"model: {name[:100]!r} is not served here; choose from: {known}",
                "model",
                "model_not_found",
            )
        return name, model

    def max_model_len(self, name: str, principal: Principal) -> int:
        """Longest prompt plus answer in tokens: least of the model's, workers' and principal's."""
        own, workers = self.models[name].max_model_len, self.dispatcher.max_model_len(name)
        return longest(principal, own if workers is None else min(own, workers))

    def least_model_len(self, name: str, principal: Principal) -> int:
        """``max_model_len`` of whatever may serve ``name``, which is one of ``names_for``."""
        return min(self.max_model_len(one, principal) for one in self.meant(name, principal))


def problems(
    unserved: Iterable[str],
    unready: Iterable[UnreadyWorker],
    kv: Mapping[str, KvStatistics],
) -> Iterator[str]:
    """What makes a run degraded, a line for people each.

    ``unserved`` are the models without a worker, ``kv`` has the tiers by worker.
    """
    for model in unserved:
        yield f"no ready worker serves {model}"
    for one in unready:
        if one.problem is not None:
            yield one.problem
    for worker_id, counted in kv.items():
        for tier in counted.tiers:
            if not tier.up:
                yield f"the tier {tier.name} of worker {worker_id} is down"
