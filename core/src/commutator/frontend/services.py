"""What the handlers share: configuration, models, routing, limits and metrics."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from aiohttp import web
from attrs import define, field

from commutator.config.model import FrontendConfig
from commutator.engine.contract import ForwardedAnswer
from commutator.errors import RequestError
from commutator.frontend.deadline import TimeLimits
from commutator.frontend.limiter import Limiter
from commutator.frontend.prompt_cache import prompt_cache
from commutator.frontend.siblings import Siblings
from commutator.observe.metrics import FrontendMetrics
from commutator.routing.event_health import EventWarning
from commutator.routing.handover_observer import HandoverObserver
from commutator.routing.moves import MigrationObserver
from commutator.routing.prefill_pool import QueueState
from commutator.routing.route import RouteFacts
from commutator.routing.worker_status import WorkerStatus
from commutator.text.model import TextModel
from commutator.text.prefix_cache import PrefixCache
from commutator.types import GenerateRequest, TokenDelta

__all__ = ["SERVICES", "Dispatched", "ForwardedRequest", "RequestDispatcher", "Services"]


class Dispatched(Protocol):
    """One request on its worker; see ``commutator.routing.dispatch.Dispatch``."""

    @property
    def worker_id(self) -> str: ...

    @property
    def worker_ids(self) -> Sequence[str]: ...

    @property
    def facts(self) -> RouteFacts: ...

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...

    async def aclose(self) -> None: ...

    async def stop(self) -> None: ...

    def explain(self) -> dict[str, Any]: ...


class ForwardedRequest(Protocol):
    """One request on its way to a worker as it came; see ``commutator.routing.forward``."""

    @property
    def worker_id(self) -> str: ...

    @property
    def facts(self) -> RouteFacts: ...

    def explain(self) -> dict[str, Any]: ...

    @property
    def model(self) -> str: ...

    async def send(self, path: str, body: bytes, headers: Mapping[str, str]) -> ForwardedAnswer: ...

    def chunks(self) -> AsyncIterator[bytes]: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class RequestDispatcher(Protocol):
    """What the front door needs of routing; see ``commutator.routing.dispatcher.Dispatcher``."""

    def models(self) -> Sequence[str]: ...

    def status(self) -> Sequence[WorkerStatus]: ...

    def ready(self) -> bool: ...

    def indexed_blocks(self) -> Mapping[str, int]: ...

    def warnings(self) -> Sequence[EventWarning]: ...

    def max_model_len(self, model: str) -> int | None: ...

    def hashed_block_size(self, model: str) -> int | None: ...

    async def dispatch(
        self,
        model: str,
        request: GenerateRequest,
        session_id: str | None = None,
        sequence_hashes: Sequence[int] | None = None,
        *,
        may_wait: bool = True,
        migration_limit: int | None = None,
        deadline_s: float | None = None,
    ) -> Dispatched: ...

    def forwards(self, model: str) -> bool: ...

    async def forward(
        self, model: str, request: GenerateRequest, session_id: str | None = None
    ) -> ForwardedRequest: ...

    def watch_waiting(self, heard: Callable[[int], None]) -> None: ...

    def watch_migrations(self, observer: MigrationObserver) -> None: ...

    def watch_handovers(self, observer: HandoverObserver) -> None: ...

    def prefill_queues(self) -> Mapping[str, QueueState]: ...

    def refused_handovers(self) -> Sequence[object]: ...

    def waiting(self, model: str) -> int: ...

    def load_peers(self) -> int: ...


@define
class Services:
    """One front door's parts."""

    config: FrontendConfig
    models: Mapping[str, TextModel]
    dispatcher: RequestDispatcher
    metrics: FrontendMetrics = field(factory=FrontendMetrics)
    time_limits: TimeLimits = field(factory=TimeLimits)
    limiter: Limiter = field(init=False)
    prompt_caches: Mapping[str, PrefixCache] = field(init=False)
    """By model."""
    registry_address: str | None = None
    """Where `commutator worker` reaches the registry; None when that is nowhere."""
    siblings: Siblings | None = None
    """The other front doors; None: this is the only one."""
    started_unix_s: int = field(factory=lambda: int(time.time()))
    draining: bool = False
    """Set when the process is about to end: ``/ready`` says no from then on."""

    def __attrs_post_init__(self) -> None:
        limits = self.config
        self.limiter = Limiter(limits.max_concurrent_requests, limits.max_queued_requests)
        queue = self.limiter.queue
        self.metrics.watch_limiter(lambda: queue.running, lambda: queue.waiting)
        self.metrics.load_peers.set_function(self.dispatcher.load_peers)
        self.dispatcher.watch_waiting(self.limiter.stepped)
        self.dispatcher.watch_migrations(self.metrics)
        self._watch_handovers()
        for name in self.models:
            self.metrics.watch_router_queue(name, partial(self.dispatcher.waiting, name))
        self.prompt_caches = {
            name: prompt_cache(
                name,
                text,
                self.config.prompt_cache_bytes,
                self.dispatcher.hashed_block_size(name),
                self.metrics,
            )
            for name, text in self.models.items()
        }

    def _watch_handovers(self) -> None:
        handovers, queues = self.metrics.handovers, self.dispatcher.prefill_queues
        self.dispatcher.watch_handovers(handovers)
        for name in queues():
            handovers.watch_queue(
                name,
                partial(_of_queue, queues, name, "requests"),
                partial(_of_queue, queues, name, "oldest_s"),
            )

    def text_model(self, name: str | None) -> tuple[str, TextModel]:
        """(name, model); None means the only one. Raises RequestError."""
        if name is None:
            if len(self.models) > 1:
                raise RequestError(
                    "model: required, because several models are served",
                    "model",
                    "missing_required_parameter",
                )
            name = next(iter(self.models))
        model = self.models.get(name)
        if model is None:
            known = ", ".join(self.models)
            raise RequestError(
                f"there is no model {name[:100]!r} here; there is: {known}",
                "model",
                "model_not_found",
            )
        return name, model

    def max_model_len(self, name: str) -> int:
        """Longest prompt plus answer in tokens: the model's own limit or its workers', if less."""
        own, workers = self.models[name].max_model_len, self.dispatcher.max_model_len(name)
        return own if workers is None else min(own, workers)


def _of_queue(queues: Callable[[], Mapping[str, QueueState]], model: str, what: str) -> float:
    return float(getattr(queues()[model], what))


SERVICES: web.AppKey[Services] = web.AppKey("services", Services)
