"""Workers: what core knows about an engine, and what an engine reports about its KV blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal

from attrs import Factory, frozen

from commutator.contract.capability import Operation, RequestOption
from commutator.contract.request import AdapterIdentity, GenerateRequest
from commutator.errors import RequestError

__all__ = [
    "BlockExplanation",
    "EdgeStatistics",
    "EngineInfo",
    "EngineLoad",
    "EventSource",
    "ExportStatistics",
    "HeldBlock",
    "KvExchange",
    "KvPrompt",
    "KvStatistics",
    "KvTransferInfo",
    "PromptExplanation",
    "PullStatistics",
    "Role",
    "TierContents",
    "TierState",
    "TierVerification",
    "TransferStatistics",
    "WorkerRecord",
]


class Role(StrEnum):
    """Which phase of requests a worker is sent. Only routing uses it: engines can do both."""

    BOTH = "both"
    """Whole requests, and the decode of disaggregated requests."""
    PREFILL = "prefill"
    """Only the prefill of disaggregated requests."""
    DECODE = "decode"
    """The decode of disaggregated requests, and whole requests that are not disaggregated."""


@frozen(kw_only=True)
class EventSource:
    """Where an engine publishes its KV events (ZMQ)."""

    endpoint: str
    """ZMQ address of rank 0's events, such as "tcp://127.0.0.1:5557"."""
    replay_endpoint: str | None = None
    """ZMQ address that repeats missed events; None: the engine repeats none."""
    topic: str = ""
    """The ZMQ topic to subscribe to; empty: all."""
    server_key: str | None = None
    """Public key (Z85) of sockets that encrypt and know their readers (CURVE); None: plain ones."""
    further_ranks: tuple[EventSource, ...] = ()
    """The sources of data-parallel ranks 1, 2, ...; if empty, rank N uses rank 0's ports plus N."""


@frozen(kw_only=True)
class KvTransferInfo:
    """What decides whether one worker can use the KV of another; see ``HandoverStyle.mismatch``."""

    protocol: str
    """Name of the transfer protocol; both sides need the same."""
    identity: str
    """Everything that decides a token's KV bytes but the sizes below: model, revision, dtype."""
    block_size: int
    """Tokens in one block."""
    token_bytes: int
    """KV bytes of one token, in all layers and ranks."""
    tensor_parallel_size: int = 1
    """Ranks that the KV of a token is divided among."""
    address: str | None = None
    """Where the other side connects, "host:port"; None where the style needs no address."""


@frozen(kw_only=True)
class KvExchange:
    """Set for a worker that reads KV blocks from the memory of other workers of its model."""

    address: str | None = None
    """Where others read its blocks, "host:port"; None: it lends none."""


@frozen(kw_only=True)
class EngineInfo:
    """What an engine reports when a client connects."""

    kind: str
    """The name of the engine, for people."""
    version: str
    """The engine's version, for people."""
    model: str
    """The name of the model that it serves."""
    max_model_len: int
    """Longest prompt plus answer, in tokens."""
    block_size: int
    """Tokens in one KV block."""
    kv_capacity_blocks: int
    """KV blocks of all data-parallel ranks together; 0 when not known."""
    caches_prefixes: bool = True
    """Whether it keeps the KV of a prompt's full blocks for later requests."""
    data_parallel_size: int = 1
    """Number of data-parallel ranks, at least 1."""
    kv_events: EventSource | None = None
    """Where it publishes KV events; None: it publishes none."""
    pid: int | None = None
    """Process id on its own machine; None when not known."""
    continues_answers: bool = False
    """Whether it supports ``GenerateRequest.generated_prefix`` in requests without constraint."""
    continues_constraints: bool = False
    """Whether in those with one, too."""
    forwards: bool = False
    """Whether it accepts clients' HTTP requests unchanged; see ``EngineClient.forward``."""
    keeps_salts_apart: bool = True
    """Whether a request that it accepts unchanged shares KV only with those of its `cache_salt`."""
    handover: KvTransferInfo | None = None
    """How its KV can be handed over; None: it serves no disaggregated request."""
    computes_prompts: bool = True
    """Whether it can serve a request alone. If not, a prefill worker must compute the prompt."""
    kv_exchange: KvExchange | None = None
    """How it shares KV blocks with other workers; None: it does not."""
    operations: tuple[str, ...] = (Operation.GENERATE,)
    """What it can be asked, in words of ``Operation``."""
    labels: tuple[str, ...] = ()
    """The classes of a ``CLASSIFY``, in order; empty: they have no names."""
    constraints: tuple[str, ...] = ()
    """The kinds of ``Constraint`` that it enforces."""
    adapters: bool = False
    """Whether it serves requests with an adapter that it has, or can load."""
    media: tuple[str, ...] = ()
    """The kinds of ``MediaIdentity`` that it takes."""
    prompt_logprobs: bool = False
    """Whether it supports ``GenerateRequest.prompt_logprobs``."""
    request_options: Mapping[str, RequestOption] = Factory(dict)
    """The ``GenerateRequest.options`` that it takes, by name."""

    def unmet(self, request: GenerateRequest) -> RequestError | None:
        """Why it cannot serve ``request``, by the field that is too much; None: it can.

        A client of an engine refuses what is unmet, and front doors do so before they route.
        """
        asked = Operation.GENERATE if request.pooling is None else request.pooling.operation
        if asked not in self.operations:
            can = ", ".join(self.operations)
            return RequestError(f"{self.kind} does not {asked}: it can {can}", "model")
        if request.is_plain:
            return None
        constraint, adapter = request.constraint, request.adapter
        if constraint is not None and constraint.kind not in self.constraints:
            problem = (
                f"{self.kind} cannot make an answer follow a constraint of kind {constraint.kind}"
            )
            return _unsupported(problem, "response_format")
        if adapter is not None and not self.adapters:
            return _unsupported(f"{self.kind} has no adapters, here {adapter}", "model")
        foreign = next((one.kind for one in request.media if one.kind not in self.media), None)
        if foreign is not None:
            return _unsupported(f"{self.kind} takes no media of kind {foreign}", "messages")
        if request.prompt_logprobs is not None and not self.prompt_logprobs:
            return _unsupported(
                f"{self.kind} computes no log probabilities of prompts", "prompt_logprobs"
            )
        return self._wrong_option(request.options)

    def _wrong_option(self, options: Mapping[str, Any]) -> RequestError | None:
        for name, value in options.items():
            if (option := self.request_options.get(name)) is None:
                known = ", ".join(self.request_options) or "none"
                return _unsupported(f"{self.kind} has no option {name!r:.80}; it has {known}", name)
            if (wrong := option.problem(value)) is not None:
                return RequestError(f"{name}: {wrong}, got {value!r:.80}", name)
        return None

    def rank_capacity_blocks(self, block_size: int) -> int:
        """KV capacity of one rank in blocks of ``block_size`` tokens; 0 when not known."""
        return self.kv_capacity_blocks * self.block_size // (self.data_parallel_size * block_size)


def _unsupported(problem: str, param: str) -> RequestError:
    return RequestError(problem, param, "unsupported_parameter")


@frozen(kw_only=True)
class EngineLoad:
    """An engine's load, as it counts it."""

    running: int = 0
    """Requests that it is computing."""
    waiting: int = 0
    """Requests that it accepted and has not begun."""
    kv_used_blocks: int = 0
    """Blocks held by requests; blocks that are only cached do not count."""
    kv_cached_blocks: int = 0
    """Blocks that hold a reusable prefix and no request needs."""
    kv_capacity_blocks: int = 0
    """All of its KV blocks."""


@frozen(kw_only=True)
class WorkerRecord:
    """A live worker, as the registry knows it."""

    worker_id: str
    """Unique in the deployment; stays the same when the worker is restarted."""
    engine: str
    """The name of the `engines` entry of the configuration that it was started from."""
    kind: str
    """The `kind` of its engine plugin."""
    model: str
    """The `models` entry that it serves."""
    address: str
    """What ``EngineConnector.connect`` takes."""
    info: EngineInfo
    """What the engine reported when it started."""
    draining: bool = False
    """Whether it gets no new requests."""
    role: Role = Role.BOTH
    """Which phase of requests it is sent."""
    instance: str = ""
    """Random for each start of the worker. The worker id belongs to one instance at a time."""
    host: str = ""
    """The name of the host that runs it, as `cluster.host.name`; empty without one."""
    labels: Mapping[str, str] = Factory(dict)
    """What is said of its host, as `cluster.host.labels`."""
    generation: str = ""
    """A digest of the configuration that it was started from: of its engine, model and tiers."""
    token_api: bool = False
    """Whether its address is that of a ``TokenApiServer``, which front doors can use without the
    plugin of its engine."""


@frozen(kw_only=True)
class ExportStatistics:
    """Counters of hand-overs on the prefill side, since start."""

    active: int = 0
    """Hand-overs that hold blocks now, or will hold some."""
    held_blocks: int = 0
    """Blocks that the active hand-overs hold now."""
    released: int = 0
    """Ended by the decode side."""
    failed: int = 0
    """Ended by an error on the prefill side."""
    lapsed: int = 0
    """Ended because the decode side did not ask in time."""


@frozen(kw_only=True)
class PullStatistics:
    """Counters of hand-overs on the decode side, since start."""

    active: int = 0
    """Hand-overs that are being fetched."""
    succeeded: int = 0
    """Hand-overs whose KV arrived."""
    failed: int = 0
    """Hand-overs whose KV did not arrive."""
    dropped: int = 0
    """Hand-overs that were aborted, or whose KV was not needed."""
    pulled_bytes: int = 0
    """Bytes read and verified."""
    nixl_bytes: int = 0
    """Bytes read, by NIXL's telemetry; 0 where no bytes move, as in simulations."""
    pull_s: float = 0.0
    """Seconds that requests spent reading, waits for the prefill worker included."""


@frozen(kw_only=True)
class TransferStatistics:
    """A worker's counters of hand-overs."""

    exports: ExportStatistics = ExportStatistics()
    """Counters of the prefill side."""
    pulls: PullStatistics = PullStatistics()
    """Counters of the decode side."""


@frozen(kw_only=True)
class TierState:
    """The state of one tier and its counters, in blocks."""

    name: str
    """The tier's name, unique in the worker."""
    medium: str
    """As ``StorageTier.medium``."""
    up: bool
    """Whether blocks are loaded from it and stored to it now."""
    capacity: int
    """Blocks that it can hold; ``UNBOUNDED`` without a limit."""
    published: int
    """Blocks that can be loaded."""
    staged: int
    """Blocks that are being stored."""
    leaving: int
    """Evicted blocks that a load still reads."""
    waiting: int
    """Blocks to be stored once there is room."""
    loading: int
    """Blocks pinned by loads or moves."""
    retained: int
    """Blocks pinned by requests."""
    pins_refused: int
    """Requests to pin a block that were refused, since start."""
    loads: Mapping[str, int]
    """Blocks by outcome since start: "loaded", "missing", "corrupt", "failed", "not run"."""
    not_loaded: Mapping[str, int]
    """Blocks that were found here and not loaded since start, by reason."""
    removed: Mapping[str, int]
    """Blocks by reason since start: "evicted", "moved down", "corrupt", "lost", ..."""
    prefetched: Mapping[str, int] = Factory(dict)
    """Blocks since start: "brought" from a slower tier before they were needed; of these "used" or
    removed "unused"."""
    latency_s: float | None
    """Measured seconds of a load without its blocks; None before the first."""
    block_s: float | None
    """Measured seconds for each block of a load; None before the first."""


@frozen(kw_only=True)
class EdgeStatistics:
    """Counters of stores from one tier, or the device, to another."""

    source: str
    """The name of the tier that blocks come from, or "device"."""
    target: str
    """The name of the tier that they are stored in."""
    stored: int
    """Blocks stored since start."""
    not_admitted: Mapping[str, int]
    """Blocks that were not to be stored, by reason."""
    failed: Mapping[str, int]
    """Blocks whose store failed, by reason."""


@frozen(kw_only=True)
class KvStatistics:
    """All counters of a block manager."""

    tiers: tuple[TierState, ...]
    """Fastest first."""
    edges: tuple[EdgeStatistics, ...]
    """Each pair of tiers that blocks moved between."""
    blocks: int
    """Number of different blocks that it knows."""
    held_on_device: int
    """Blocks of the device that a store still reads, so that they must not be reused."""
    loads_running: int
    """Loads that have begun and not ended."""
    stores_running: int
    """Stores that have begun and not ended."""
    sequence_bytes: Mapping[str, tuple[float, int]] = Factory(dict)
    """By kind of layers: KV bytes of one more token of a sequence, and the most of a sequence in a
    window or state, however long; 0: no limit. Of one tensor- and pipeline-parallel rank."""

    def edge(self, source: str, target: str) -> EdgeStatistics:
        """The counters of one edge; zeroes when nothing was stored that way."""
        return next(
            iter(self._edges(source, target)),
            EdgeStatistics(source=source, target=target, stored=0, not_admitted={}, failed={}),
        )

    def _edges(self, source: str, target: str) -> Iterable[EdgeStatistics]:
        return [edge for edge in self.edges if (edge.source, edge.target) == (source, target)]


@frozen(kw_only=True)
class KvPrompt:
    """A prompt, to name its KV blocks."""

    token_ids: Sequence[int]
    """The prompt."""
    cache_salt: str | None = None
    """As in the requests that use the blocks; None: without a salt."""
    adapter: AdapterIdentity | None = None
    """The adapter; None: the model itself."""


@frozen(kw_only=True)
class TierContents:
    """What one tier holds, or the engine's own memory, which is named "device"."""

    tier: str
    """The tier's name, or "device"."""
    medium: str
    """As in KV events, such as "CPU"."""
    up: bool
    """Whether blocks are loaded from it and stored to it now."""
    blocks: int
    """Blocks that can be loaded from it."""
    pinned: int
    """Blocks pinned by requests."""
    bytes: int | None
    """Bytes that the blocks take up; None when the tier is down, or too busy to answer."""
    capacity_blocks: int | None
    """None where the tier sets no limit."""


@frozen(kw_only=True)
class HeldBlock:
    """One copy of a block."""

    name: str
    """The name of the tier that holds it."""
    state: Literal["published", "being stored", "leaving"]
    """Only published copies can be loaded."""
    note: str = ""
    """Such as "tier is down" or "pinned, for 20 s"; for people."""


@frozen(kw_only=True)
class BlockExplanation:
    """Whether one block of a prompt would be reused, and why or why not."""

    key: str
    """The block's key in hex."""
    held: tuple[HeldBlock, ...]
    """Its copies in tiers, fastest first."""
    reusable: bool
    """Whether a request for the prompt would reuse it."""
    tier: str | None
    """The tier that it would be loaded from; None: from none."""
    reason: str
    """For people."""


@frozen(kw_only=True)
class PromptExplanation:
    """Which blocks of a prompt would be reused at one worker."""

    prompt_tokens: int
    """Length of the prompt."""
    block_size: int
    """Tokens in a block."""
    blocks: tuple[BlockExplanation, ...]
    """Every full block but one that holds the last token, which is always computed; in order."""


@frozen(kw_only=True)
class TierVerification:
    """The result of reading every block of one tier."""

    tier: str
    """The tier's name."""
    blocks: int
    """Committed when it began; every block is in one of the four counts below, unless ``problem``
    says otherwise."""
    intact: int
    """Blocks whose bytes and checksum match."""
    corrupt: int
    """Blocks with wrong bytes; they were removed."""
    gone: int
    """Blocks that were evicted during the verification, or deleted by others."""
    unreadable: int
    """Blocks that could not be read; they stay in the tier."""
    bytes: int
    """Bytes of the blocks that were read."""
    seconds: float
    """How long it took."""
    problem: str | None
    """Why the verification ended early; None: it did not."""
