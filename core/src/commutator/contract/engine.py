"""Engines: how core starts an engine's server and talks to it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from attrs import Attribute, Factory, frozen

from commutator.contract.disagg import HandoverStyle
from commutator.contract.launcher import LaunchPlan
from commutator.contract.planner import EnginePerformance
from commutator.contract.request import GenerateRequest, TokenDelta
from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    PositiveInt,
    PositiveSeconds,
    setting,
)
from commutator.contract.tier import TierConfig
from commutator.contract.worker import (
    EngineInfo,
    EngineLoad,
    KvPrompt,
    KvStatistics,
    PromptExplanation,
    TierContents,
    TierVerification,
    TransferStatistics,
    WorkerRecord,
)
from commutator.errors import EngineError, EngineWithoutTiersError

__all__ = [
    "EngineClient",
    "EngineConfig",
    "EngineConnector",
    "ForwardedAnswer",
    "GenerationConfig",
    "HttpRelay",
    "LaunchContext",
    "ModelConfig",
    "NodeGroup",
    "RelayStart",
    "TokenStream",
]

_Workers = Annotated[int, Bounds(minimum=1, maximum=10_000)]
_Nodes = Annotated[int, Bounds(minimum=1, maximum=64)]


@frozen(kw_only=True)
class EngineConfig:
    """Options of every `engines` entry; each engine plugin adds its own."""

    kind: str = setting("The engine plugin that runs these workers.", takes_effect="never")
    name: str | None = setting("Names the workers: NAME-0, NAME-1, ...; the kind by default.", None)
    model: str | None = setting(
        "The `models` entry it serves; not needed when there is only one.", None
    )
    replicas: _Workers = setting("How many workers of this kind.", 1, takes_effect="live")
    nodes: _Nodes = setting(
        "Over how many nodes of a Ray cluster each worker runs: tensor or pipeline parallelism of "
        "an engine that supports it (vllm).",
        1,
    )
    role: Literal["both", "prefill", "decode"] = setting(
        "What the workers are sent: whole requests and decode (both, decode), or only the prefill "
        "of requests that another worker decodes. `commutator worker role` changes it later.",
        "both",
    )
    start_timeout_s: PositiveSeconds = setting(
        "A worker that starts and does not answer is started anew after this time in which it used "
        "the CPU for less than a twentieth, or after 12 times as long, so that one may load and "
        "compile; likewise one that has answered and does not any more, whatever it does.",
        300.0,
    )


ConfigT = TypeVar("ConfigT", bound=EngineConfig)


def _is_a_name(_: ModelConfig, _field: Attribute[Any], value: str) -> None:
    if not value.strip():
        raise ValueError("name: it is empty; give the name that clients ask for")


@frozen(kw_only=True)
class GenerationConfig:
    """How answers are chosen where a request does not say it."""

    defaults: Literal["model", "none"] = setting(
        "Where the values that are not given here come from: the model's `generation_config.json`, "
        "which folders and models of the Hub have, or nowhere, so that temperature is 1 and all "
        "else off. What ends an answer is the model's own in any case.",
        "model",
    )
    temperature: Annotated[float, Bounds(minimum=0)] | None = setting(
        "0 always takes the likeliest token.", None
    )
    top_p: Annotated[float, Bounds(above=0, maximum=1)] | None = setting(
        "Keep the likeliest tokens that make up this probability.", None
    )
    top_k: NonNegativeInt | None = setting("Keep the k likeliest tokens; 0 keeps all.", None)
    min_p: Annotated[float, Bounds(minimum=0, maximum=1)] | None = setting(
        "Drop tokens less likely than this times the likeliest.", None
    )
    repetition_penalty: Annotated[float, Bounds(above=0)] | None = setting(
        "Above 1 makes tokens that occurred less likely.", None
    )
    max_tokens: PositiveInt | None = setting(
        "The longest answer to a conversation; by default what is left of the context. "
        "Completions end after 16 tokens, as their API has it.",
        None,
    )


@frozen(kw_only=True)
class ModelConfig:
    """A model that clients can use."""

    name: str = setting("The name that clients give in `model`.", validator=_is_a_name)
    source: str = setting(
        "A .gguf file, a Hugging Face directory, package:NAME for an installed Python package that "
        "ships one of either, or a name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B, which "
        "`commutator serve` downloads once.",
        takes_effect="never",
    )
    chat_template: str | None = setting(
        "A Jinja file that replaces the model's own chat template.",
        None,
        takes_effect="new requests",
    )
    max_model_len: PositiveInt | None = setting(
        "Longest prompt plus answer in tokens; the model's own limit when not given.", None
    )
    generation: GenerationConfig = setting(
        "How answers are chosen where a request does not say it.",
        factory=GenerationConfig,
        takes_effect="new requests",
    )
    tool_parser: str = setting(
        "Reads calls of tools in the model's answers: the model's family; auto: the one that its "
        "chat template shows; none: calls are not read, and tools are refused.",
        "auto",
        takes_effect="new requests",
    )
    reasoning_parser: str = setting(
        "Reads what the model thinks before it answers; auto: as its chat template shows; none: "
        "thoughts are part of the text.",
        "auto",
        takes_effect="new requests",
    )
    special_tokens_in_contents: Literal["text", "tokens"] = setting(
        "What `<|im_start|>` and the like are in what clients write in conversations: text, so "
        "that nobody can forge a role; or tokens, if all clients are trusted. In plain prompts "
        "they are tokens.",
        "text",
        takes_effect="new requests",
    )


@frozen(kw_only=True)
class NodeGroup:
    """The place of one process among those that are one worker, on as many nodes."""

    rank: int
    """From 0; the process of rank 0 is the one that is asked as the worker."""
    nodes: int
    """How many processes there are."""
    master_address: str
    """The address of rank 0's node."""
    master_port: int
    """A TCP port there that was free, chosen for this start of the whole group."""


@frozen(kw_only=True)
class LaunchContext:
    """What the supervisor gives a connector to plan one worker process."""

    worker_id: str
    """The worker's id, unique in the deployment."""
    model: ModelConfig
    """The model that the worker serves."""
    host: str
    """The address that the worker must listen on."""
    port: int
    """A free TCP port, chosen for this start of this worker."""
    state_dir: Path
    """A folder for this worker alone; removed when the supervisor stops."""
    tiers: tuple[TierConfig, ...] = ()
    """Storage tiers for KV blocks beyond the engine's own memory, fastest first."""
    advertise: str = Factory(lambda self: self.host, takes_self=True)
    """The address at which others reach what listens at ``host``, which may be all interfaces."""
    kv_host: str = Factory(lambda self: self.host, takes_self=True)
    """The address at which the worker hands KV over to others, and lends it."""
    guarded_host: str = Factory(lambda self: self.advertise, takes_self=True)
    """The address at which a ``TokenApiServer`` may listen beside an engine at ``host``: other
    hosts reach it, and it knows who asks."""
    group: NodeGroup | None = None
    """Set for a worker over several nodes; None: the process is the whole worker."""
    devices: tuple[int, ...] = ()
    """The worker's own among ``EngineConnector.devices``; empty where those are."""


@frozen(kw_only=True)
class HttpRelay:
    """What other hosts may ask an engine's HTTP server, which itself listens on this host only.

    The host's relay takes their requests by mutual TLS. Every path that is not named here is for
    operators of the cluster.
    """

    read_paths: tuple[str, ...]
    """What front doors and operators may GET."""
    request_paths: tuple[str, ...]
    """What front doors may POST."""
    module: str
    """The relay: run by this Python with a ``RelayStart`` as JSON in ``RelayStart.VARIABLE``."""
    api_key: str | None = None
    """What the server asks for; by default that of a launched server."""


@frozen
class RelayStart:
    """What the process of a relay is to do."""

    VARIABLE: ClassVar[str] = "COMMUTATOR_RELAY"
    """The environment variable by which the host's agent passes it."""
    listen: str
    """The IP address at which it listens."""
    port: int
    """The TCP port there."""
    url: str
    """Where others reach it, as in the worker's record."""
    target: str
    """The engine's server, http://HOST:PORT."""
    rules: HttpRelay
    """What may be asked of it."""


class TokenStream(Protocol):
    """The deltas of one request. Closing it before the end aborts the request in the engine."""

    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def __anext__(self) -> TokenDelta: ...

    async def aclose(self) -> None:
        """Abort the request unless it is finished. Idempotent; never raises."""


class ForwardedAnswer(Protocol):
    """An engine's own answer to a client's HTTP request."""

    @property
    def status(self) -> int:
        """The HTTP status; an error status of the engine is an answer, too."""

    @property
    def content_type(self) -> str:
        """The value of its header Content-Type."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body, part by part. Raises EngineUnavailableError when the worker dies."""


class EngineClient(ABC):
    """One frontend's (or the supervisor's) connection to one worker. Used from one event loop."""

    def expect(self, record: WorkerRecord) -> None:
        """Take only this worker for the one to connect to, where the engine can tell.

        Called at most once, before ``start``. Addresses are used again: after a restart, another
        process may listen at one. By default the process that answers is the worker.
        """
        del record

    @abstractmethod
    async def start(self) -> EngineInfo:
        """Connect and learn what the engine is.

        Raises EngineUnavailableError when it does not answer; the caller tries again while the
        process is alive. Calling it again on a started client reconnects if needed.
        """

    @abstractmethod
    def generate(self, request: GenerateRequest) -> TokenStream:
        """Begin a request and return its deltas; the last has a finish reason.

        The stream raises EngineUnavailableError when the worker dies, EngineOverloadedError when
        it is full, RequestError when it refuses the request itself, EngineNeedsPrefillError when
        it serves no request without another worker, and EngineError otherwise.
        """

    def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[ForwardedAnswer]:
        """POST a client's JSON to ``path`` of the engine's HTTP server.

        Called only when ``EngineInfo.forwards`` is true. Leaving the context aborts the request.
        Entering it raises EngineUnavailableError and EngineOverloadedError as ``generate`` does.
        """
        raise EngineError(f"this engine has no HTTP endpoint {path}")

    @abstractmethod
    async def load(self) -> EngineLoad:
        """The engine's load as it counts it. Raises EngineUnavailableError."""

    async def check_health(self) -> None:
        """Return if the engine answers; raise EngineUnavailableError if not. May be slow."""
        await self.load()

    @property
    def answers(self) -> bool:
        """False while the worker leaves pings unanswered, and may be about to be taken for lost.

        A request is sent there only where no other worker answers. By default True.
        """
        return True

    def watch_answers(self, changed: Callable[[], None]) -> None:
        """Have ``changed`` called, in the event loop, whenever ``answers`` changes.

        Called once, before ``start``. By default nothing: ``answers`` never changes.
        """
        del changed

    @property
    def admin_address(self) -> str | None:
        """The "host:port" where ``TokenApiClient`` reaches the same engine; None: it cannot."""
        return None

    # Questions about storage tiers. Each raises EngineWithoutTiersError where the engine has none,
    # EngineError when it refuses the question, and EngineUnavailableError when it does not answer.

    async def kv_statistics(self, *, timeout_s: float = 5.0) -> KvStatistics:
        """The counters of the engine's block manager."""
        raise EngineWithoutTiersError

    async def kv_contents(self, *, timeout_s: float = 5.0) -> Sequence[TierContents]:
        """How full each tier is, fastest first; may begin with the engine's own memory."""
        raise EngineWithoutTiersError

    async def kv_explain(self, prompt: KvPrompt, *, timeout_s: float = 5.0) -> PromptExplanation:
        """Whether each block of a prompt would be reused, and why."""
        raise EngineWithoutTiersError

    async def kv_prefetch(self, prompt: KvPrompt, *, timeout_s: float = 5.0) -> None:
        """Begin to move a prompt's blocks up from slower tiers; does not wait for the bytes."""
        raise EngineWithoutTiersError

    async def kv_evict(
        self, tier: str | None = None, *, timeout_s: float = 5.0
    ) -> Mapping[str, int]:
        """Remove every block of one tier or of all (None). Returns the number of blocks by tier."""
        raise EngineWithoutTiersError

    async def kv_verify(
        self, tier: str | None = None, *, timeout_s: float = 3600.0
    ) -> Sequence[TierVerification]:
        """Read every block of one tier or of all (None) again, and remove corrupt ones.

        Reads all bytes of the tier while the tier serves other requests, so it can take long.
        """
        raise EngineWithoutTiersError

    async def set_peers(self, addresses: Sequence[str], *, timeout_s: float = 5.0) -> None:
        """Set the addresses, "host:port", where other workers of the model lend blocks."""
        raise EngineWithoutTiersError

    async def handover_statistics(self, *, timeout_s: float = 5.0) -> TransferStatistics:
        """The worker's counters of hand-overs.

        Raises EngineError when it has none, EngineUnavailableError when it does not answer.
        """
        del timeout_s
        raise EngineError("this engine does not count its hand-overs")

    async def refused_connections(self, *, timeout_s: float = 5.0) -> Mapping[str, int]:
        """Connections that the worker's process refused since it began, by the service asked for.

        They came from processes that did not prove that they belong to the deployment. Raises
        EngineError.
        """
        del timeout_s
        return {}

    @abstractmethod
    async def close(self) -> None:
        """Abort the requests in flight and disconnect. Idempotent; never raises."""


class EngineConnector(ABC, Generic[ConfigT]):
    """What an engine plugin registers: how to start an engine server and how to talk to it.

    A connector is stateless; one instance serves every worker of its kind.
    """

    uses_tiers: bool = False
    """Whether its engines store KV blocks in the configured storage tiers."""
    spans_nodes: bool = False
    """Whether ``launch_plan`` obeys ``LaunchContext.group``, for the option `nodes`."""
    secures_connections: bool = False
    """Whether what comes from other hosts is encrypted, and comes from who may ask.

    So it is for workers behind ``TokenApiServer``, and for those of which ``relay`` says what may
    be asked. Others are not started where other hosts reach them.
    """

    def problems(
        self, config: ConfigT, model: ModelConfig, tiers: Sequence[TierConfig]
    ) -> Iterable[str]:
        """Why this machine cannot run these workers, as "OPTION: what is wrong, what to do".

        Called before any process starts, and by `commutator config check`. It may read files and
        run programs for a few seconds. Other checks report a ``source`` that names no model.
        """
        del config, model, tiers
        return ()

    def warnings(self, config: ConfigT, model: ModelConfig) -> Iterable[str]:
        """What these workers will do differently than people may expect, in the same form.

        Called after ``problems`` found none.
        """
        del config, model
        return ()

    def model_notes(self, config: ConfigT, model: ModelConfig) -> Iterable[str]:
        """What they do with the model's KV, for people: lines of `commutator config check`."""
        del config, model
        return ()

    def devices(self, config: ConfigT) -> Sequence[int]:
        """The GPUs that are divided evenly among its replicas, each of which owns its part.

        Empty, as by default: workers see every GPU that this machine shows them.
        """
        del config
        return ()

    @abstractmethod
    def launch_plan(self, config: ConfigT, context: LaunchContext) -> LaunchPlan | None:
        """The process to start for one worker; None: attach to a server that runs already."""

    def attach_address(self, config: ConfigT) -> str:
        """Where the running server is, for a configuration whose launch plan is None."""
        raise NotImplementedError(
            f"{type(self).__name__}.launch_plan returned None, so attach_address must be defined"
        )

    @abstractmethod
    def connect(self, config: ConfigT, address: str) -> EngineClient:
        """A client, not yet connected, for the worker at ``address``."""

    def relay(self, config: ConfigT) -> HttpRelay | None:
        """What of its workers' HTTP servers the host relays to others.

        With it, in a cluster, they are launched on the loopback interface, their KV events are
        passed on by the host, and front doors ``connect`` to the relay's address: https://HOST:PORT
        and whatever followed in their own. None: other hosts reach the workers themselves.
        """
        del config
        return None

    def handover_style(self, config: ConfigT) -> HandoverStyle | None:
        """The style of disaggregated requests of these workers; None: they serve none."""
        return None

    def performance(self, config: ConfigT) -> EnginePerformance | None:
        """How fast one worker is, where its options say so; None: it would have to be measured."""
        return None
