"""How core reaches an engine: what a connector supplies, and what its client can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from attrs import field, frozen

from commutator.config.model import EngineConfig, ModelConfig, TierConfig
from commutator.engine.handover.statistics import HandoverStatistics
from commutator.engine.handover.style import HandoverStyle
from commutator.engine.virtual import VirtualEngine
from commutator.errors import EngineError
from commutator.types import EngineInfo, EngineLoad, GenerateRequest, TokenDelta

__all__ = [
    "NO_TIERS",
    "EngineClient",
    "EngineConnector",
    "ForwardedAnswer",
    "LaunchContext",
    "LaunchPlan",
    "TokenStream",
]

ConfigT = TypeVar("ConfigT", bound=EngineConfig)

NO_TIERS = "this engine keeps no blocks in tiers"
"""What is answered to a question about tiers where there are none; nothing failed then."""


@frozen
class LaunchContext:
    """What the supervisor gives a connector to plan one worker process."""

    worker_id: str
    model: ModelConfig
    host: str
    port: int
    """A free TCP port, chosen for this start of this worker."""
    state_dir: Path
    """A folder of this worker's own; removed when the supervisor stops."""
    tiers: tuple[TierConfig, ...] = ()
    """Where KV blocks are kept beyond the engine's own memory, fastest first."""


@frozen
class LaunchPlan:
    """One process to start. The worker is ready once ``EngineClient.start`` succeeds."""

    argv: tuple[str, ...]
    address: str
    """What ``EngineConnector.connect`` is given to reach it."""
    env: Mapping[str, str] = field(factory=dict)
    """Added to the supervisor's own environment."""


class TokenStream(Protocol):
    """One request's deltas. Closing it before the end aborts the request in the engine."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent; never raises."""


class ForwardedAnswer(Protocol):
    """An engine's own answer to a client's HTTP request."""

    @property
    def status(self) -> int:
        """The HTTP status; errors of the engine's own are answers, too."""

    @property
    def content_type(self) -> str: ...

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises EngineUnavailableError when the worker dies."""


class EngineClient(ABC):
    """One frontend's (or the supervisor's) connection to one worker. Used from one event loop."""

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Connect and learn what the engine is.

        Raises EngineUnavailableError when it does not answer; the caller tries again while the
        process is alive. Calling it again on a started client reconnects if needed.
        """

    @abstractmethod
    def generate(self, request: GenerateRequest) -> TokenStream:
        """Begin a request; its deltas come out of the stream, the last with a finish reason.

        The stream raises EngineUnavailableError when the worker dies, EngineOverloadedError when
        it is full, RequestError when it refuses the request itself, EngineNeedsPrefillError when
        it serves no request without another worker, and EngineError otherwise.
        """

    def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[ForwardedAnswer]:
        """POST a client's JSON to the engine's own ``path``, for what only the engine can do.

        Only where ``EngineInfo.forwards`` is set. Leaving the context aborts the request. Entering
        it raises EngineUnavailableError and EngineOverloadedError as ``generate`` does.
        """
        raise EngineError(f"this engine has no HTTP endpoint {path} of its own")

    @abstractmethod
    async def load(self) -> EngineLoad:
        """The engine's own account of its load. Raises EngineUnavailableError."""

    async def check_health(self) -> None:
        """Return if the engine answers; raise EngineUnavailableError if not. May be slow."""
        await self.load()

    async def drain(self) -> None:
        """Tell the engine to accept nothing new; what runs goes on. Default: nothing to tell."""

    @property
    def admin_address(self) -> str | None:
        """The "host:port" where ``TokenApiClient`` can ask the engine, too; None: nowhere."""
        return None

    async def kv_admin(
        self, what: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 5.0
    ) -> Any:
        """Ask about the KV blocks that the engine keeps in storage tiers; see ``kv.admin``.

        Raises EngineError when it keeps none, EngineUnavailableError when it does not answer.
        """
        del what, arguments, timeout_s
        raise EngineError(NO_TIERS)

    async def handover_statistics(self, *, timeout_s: float = 5.0) -> HandoverStatistics:
        """What the worker counts of its hand-overs.

        Raises EngineError when it counts none, EngineUnavailableError when it does not answer.
        """
        del timeout_s
        raise EngineError("this engine does not count its hand-overs")

    @abstractmethod
    async def close(self) -> None:
        """Abort what is in flight and disconnect. Idempotent; never raises."""


class EngineConnector(ABC, Generic[ConfigT]):
    """What an engine plugin registers: how to start an engine server and how to talk to it.

    A connector is stateless; one instance serves every worker of its kind.
    """

    uses_tiers: bool = False
    """Whether its engines keep KV blocks in the configured storage tiers."""

    @abstractmethod
    def launch_plan(self, config: ConfigT, context: LaunchContext) -> LaunchPlan | None:
        """The process to start for one worker, or None when there is only one to attach to."""

    def attach_address(self, config: ConfigT) -> str:
        """Where the running server is, for a configuration whose launch plan is None."""
        raise NotImplementedError(
            f"{type(self).__name__}.launch_plan returned None, so attach_address must be defined"
        )

    @abstractmethod
    def connect(self, config: ConfigT, address: str) -> EngineClient:
        """A client, not yet connected, for the worker at ``address``."""

    def handover_style(self, config: ConfigT) -> HandoverStyle | None:
        """How these workers take part in requests whose prefill and decode are apart; None: not."""
        return None

    def virtual(self, config: ConfigT) -> VirtualEngine | None:
        """A model of one worker in virtual time, for replays; None when there is none."""
        return None
