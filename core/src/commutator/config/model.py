"""Every option of a deployment, with its default. One YAML file fills one ``Config``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator.config.origins import origin_problem
from commutator.config.secret import Secret
from commutator.schema import (
    Bounds,
    Fraction,
    NonNegativeInt,
    Port,
    PositiveInt,
    PositiveSeconds,
    Seconds,
    Size,
    setting,
)

__all__ = [
    "BusyConfig",
    "Config",
    "DisaggregationConfig",
    "EngineConfig",
    "EvictionConfig",
    "FrontendConfig",
    "LogConfig",
    "MigrationConfig",
    "ModelConfig",
    "PluginsConfig",
    "RouterConfig",
    "RuntimeConfig",
    "TierConfig",
    "TierPolicyConfig",
    "TlsConfig",
    "TracingConfig",
]


_Workers = Annotated[int, Bounds(minimum=1, maximum=10_000)]
_FrontDoors = Annotated[int, Bounds(minimum=1, maximum=1000)]


def _is_a_name(_: ModelConfig, _field: Attribute[Any], value: str) -> None:
    if not value.strip():
        raise ValueError("name: it is empty; give the name that clients ask for")


@frozen(kw_only=True)
class ModelConfig:
    """A model that clients can ask for."""

    name: str = setting("The name that clients give in `model`.", validator=_is_a_name)
    source: str = setting(
        "A .gguf file, a Hugging Face directory, or package:NAME for an installed Python package "
        "that ships one .gguf file."
    )
    chat_template: str | None = setting(
        "A Jinja file that replaces the model's own chat template.", None
    )
    max_model_len: PositiveInt | None = setting(
        "Longest prompt plus answer in tokens; the model's own limit when not given.", None
    )


@frozen(kw_only=True)
class EngineConfig:
    """What every engine entry has; each engine plugin adds options of its own beside these."""

    kind: str = setting("The engine plugin that runs these workers.")
    name: str | None = setting("Names the workers: NAME-0, NAME-1, ...; the kind by default.", None)
    model: str | None = setting(
        "The `models` entry it serves; not needed when there is only one.", None
    )
    replicas: _Workers = setting("How many workers of this kind.", 1)
    role: Literal["both", "prefill", "decode"] = setting(
        "What the workers are sent: whole requests and decode (both, decode), or only the prefill "
        "of requests that are decoded elsewhere. `commutator worker role` changes it later.",
        "both",
    )
    start_timeout_s: PositiveSeconds = setting(
        "Give a starting worker this long to answer before it is started anew.", 300.0
    )


def _needs_threshold(config: BusyConfig, field: Attribute[Any], value: float) -> None:
    if value != field.default and not config.enabled:
        raise ValueError(
            f"{field.name}: without effect, as no worker is ever busy; set max_active_requests, "
            "active_prefill_tokens_threshold or active_decode_blocks_threshold, or remove it"
        )


@frozen(kw_only=True)
class BusyConfig:
    """When a worker is too busy for one more request, and how requests wait until one is not.

    Without any threshold no worker is ever too busy.
    """

    max_active_requests: PositiveInt | None = setting(
        "A worker with so many requests in flight is busy.", None
    )
    active_prefill_tokens_threshold: NonNegativeInt | None = setting(
        "A worker is busy with more prompt tokens than this sent to it and not yet computed.", None
    )
    active_decode_blocks_threshold: Annotated[float, Bounds(above=0, maximum=10)] | None = setting(
        "A worker is busy when its requests in flight need more than this part of its KV blocks. "
        "Blocks count once for each request, so that with shared prefixes it may well be above 1.",
        None,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests of one model that may wait, in each front door, while every worker is busy; one "
        "more is answered 429, or the last of them if its `priority` is less urgent. Lower "
        "`priority` goes first.",
        1024,
        validator=_needs_threshold,
    )
    max_queue_s: PositiveSeconds = setting(
        "A request that has waited so long for a worker is answered 429.",
        60.0,
        validator=_needs_threshold,
    )

    @property
    def enabled(self) -> bool:
        """Whether any threshold is set."""
        return (
            self.max_active_requests is not None
            or self.active_prefill_tokens_threshold is not None
            or self.active_decode_blocks_threshold is not None
        )


@frozen(kw_only=True)
class RouterConfig:
    """What every routing policy has; each policy plugin adds options of its own."""

    kind: str = setting("The routing policy plugin.")
    block_size: PositiveInt = setting(
        "Tokens in one block of the prefix index; best the same as the engines' KV blocks.", 16
    )
    use_kv_events: bool = setting(
        "Learn what engines hold from their KV events; otherwise guess it from what was routed.",
        True,
    )
    router_ttl_s: PositiveSeconds = setting(
        "When guessing: how long a routed prompt is assumed to stay in a worker's cache.", 120.0
    )
    router_replica_sync: bool = setting(
        "Front doors tell each other what they have in flight, so that each sees the whole load.",
        True,
    )
    busy: BusyConfig = setting(
        "When every worker has enough to do, and who waits then.", factory=BusyConfig
    )


@frozen(kw_only=True)
class EvictionConfig:
    """What every eviction policy has; each policy plugin adds options of its own."""

    kind: str = setting("The eviction policy plugin.")


@frozen(kw_only=True)
class AdmissionConfig:
    """Which blocks a tier takes. A block is never stored twice in one tier."""

    min_hits: PositiveInt = setting(
        "Take a block once it was used so often; the first computation is a use.", 1
    )
    max_blocks: PositiveInt | None = setting(
        "Take only so many blocks from the beginning of a prompt.", None
    )
    prompt_only: bool = setting("Leave out blocks with generated tokens.", False)


def _default_eviction() -> EvictionConfig:
    return EvictionConfig(kind="lru")


@frozen(kw_only=True)
class TierPolicyConfig:
    """What a tier keeps and what goes: equally for storage tiers and for modelled ones."""

    kind: str = setting("The storage tier plugin.")
    write: Literal["through", "on_evict"] = setting(
        "When a block comes here: as soon as it is computed, or when the tier above gives it up.",
        "through",
    )
    eviction: EvictionConfig = setting(
        "Which block goes when room is needed; {kind: lru} by default.", factory=_default_eviction
    )
    admission: AdmissionConfig = setting("Which blocks come in.", factory=AdmissionConfig)
    tenant_share: Fraction | None = setting(
        "Largest part of the capacity that the blocks of one tenant (`cache_salt`) may fill; then "
        "it makes room with its own. Not limited when not given, nor for blocks without a salt.",
        None,
    )
    tenant_shares: Mapping[str, Fraction] = setting(
        "Tenants, by their `cache_salt`, for which another share holds.", factory=dict
    )


@frozen(kw_only=True)
class TierConfig(TierPolicyConfig):
    """What every storage tier has; each tier plugin adds options of its own."""

    prefetch: bool = setting(
        "Bring blocks up from slower tiers before they are asked for: those of requests that wait, "
        "in the worker or in the front door, and of conversations that may go on. Only the fastest "
        "tier that is written to does.",
        True,
    )
    compression: Literal["none", "zstd", "lz4"] = setting("How blocks are compressed.", "none")
    encryption_key: Secret | None = setting(
        "32, 48 or 64 hex digits: blocks are encrypted with AES-GCM under this key.", None
    )
    load_timeout_s: PositiveSeconds = setting(
        "A load that takes longer is given up, and the blocks are computed.", 5.0
    )
    store_timeout_s: PositiveSeconds = setting("A store that takes longer is given up.", 60.0)
    max_attempts: PositiveInt = setting("How often a failed block is tried in all.", 2)
    max_bytes_per_s: Size | None = setting(
        'Limit of what is moved, such as "500MB"; none by default.', None
    )
    max_failures: PositiveInt = setting(
        "After so many failed jobs in a row the tier is left alone for a while.", 3
    )


@frozen(kw_only=True)
class MigrationConfig:
    """What becomes of a request whose worker is lost while it answers."""

    limit: NonNegativeInt = setting(
        "How often a request that lost its worker may go on at another one; 0 lets it fail. A "
        "request's own `migration_limit` lowers it.",
        1,
    )
    wait_s: Seconds = setting(
        "When no other worker is ready, it waits so long for one, such as the lost one once it was "
        "started again.",
        10.0,
    )


def _default_router() -> RouterConfig:
    return RouterConfig(kind="round_robin")


@frozen(kw_only=True)
class DisaggregationConfig:
    """What every policy has that decides about prefill elsewhere; each plugin adds its own."""

    kind: str = setting("The policy plugin that decides for each request.")
    router: RouterConfig = setting(
        "How a prefill worker is chosen, and with `busy` the prefill queue. By default as the "
        "decode worker, and each prefill worker gets 4 requests at a time.",
        factory=_default_router,
    )
    on_failure: Literal["fail", "prefill_locally", "another_worker"] = setting(
        "When the KV does not arrive: the client gets the error, the decode worker computes the "
        "prompt itself, or it does so after one more prefill worker was tried.",
        "prefill_locally",
    )
    timeout_s: PositiveSeconds = setting("A decode worker waits at most so long for the KV.", 60.0)


@frozen(kw_only=True)
class TlsConfig:
    """Serve HTTPS instead of HTTP."""

    cert_file: str = setting("PEM file with the certificate chain.")
    key_file: str = setting("PEM file with the private key.")


def _are_origins(_: FrontendConfig, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if problems := [problem for origin in value if (problem := origin_problem(origin))]:
        raise ValueError("; ".join(problems))


@frozen(kw_only=True)
class FrontendConfig:
    """The OpenAI-compatible front door."""

    host: str = setting("Address to listen on.", "127.0.0.1")
    port: Port = setting("Port to listen on; 0 chooses a free one.", 8000)
    replicas: _FrontDoors = setting("Front-door processes that share the port.", 1)
    max_concurrent_requests: PositiveInt = setting(
        "Requests served at the same time by one front-door process, which this protects; those "
        "that wait for a worker (`router.busy`) do not count.",
        256,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait for a place; one more is answered 429.", 1024
    )
    request_timeout_s: PositiveSeconds = setting(
        "A request that takes longer is answered 504; the header X-Request-Timeout-S lowers it.",
        600.0,
    )
    max_body_bytes: PositiveInt = setting("Larger request bodies are answered 413.", 16 << 20)
    prompt_cache_bytes: NonNegativeInt = setting(
        "Memory of one front-door process and model for the tokens of prompts' beginnings, and an "
        "eighth of it for those of words, so that what is shared is tokenized only once; 0 keeps "
        "none.",
        64 << 20,
    )
    api_keys: tuple[Secret, ...] = setting(
        "Clients must send one of these as a bearer token; empty lets everyone in.", ()
    )
    cors_origins: tuple[str, ...] = setting(
        'Browser origins that may call, such as "https://chat.example"; "*" allows every one.',
        (),
        validator=_are_origins,
    )
    tls: TlsConfig | None = setting("Serve HTTPS.", None)


@frozen(kw_only=True)
class RuntimeConfig:
    """How processes are started, watched and stopped."""

    lease_s: PositiveSeconds = setting(
        "A worker that gives no sign of life for this long is taken out of routing.", 5.0
    )
    restart_backoff_s: PositiveSeconds = setting(
        "Wait before the first restart of a failed process; doubles with each failure in a row.",
        0.5,
    )
    restart_backoff_max_s: PositiveSeconds = setting("Longest wait between restarts.", 30.0)
    drain_timeout_s: Seconds = setting(
        "After SIGTERM, running requests may take this long to finish.", 60.0
    )
    state_dir: str | None = setting(
        "Folder for sockets and scratch files; a temporary one by default.", None
    )


@frozen(kw_only=True)
class LogConfig:
    """What the processes print."""

    format: Literal["text", "json"] = setting(
        "Lines for people, or one JSON object a line.", "text"
    )
    level: Literal["debug", "info", "warning", "error"] = setting("Least severity printed.", "info")


@frozen(kw_only=True)
class TracingConfig:
    """OpenTelemetry spans of requests and of their legs; needs commutator[tracing]."""

    endpoint: str = setting(
        "Where spans are posted, OTLP over HTTP: http://HOST:4318/v1/traces, for example."
    )
    service_name: str = setting("What the spans say they come from.", "commutator")
    sample_ratio: Fraction = setting(
        "The part of the traces that begin here; clients decide about those that they begin.", 1.0
    )


@frozen(kw_only=True)
class PluginsConfig:
    """Which installed plugins are used."""

    block: tuple[str, ...] = setting("Entry-point names of plugins not to load.", ())


@frozen(kw_only=True)
class Config:
    """A whole deployment."""

    models: tuple[ModelConfig, ...] = setting("The models that clients can ask for.")
    engines: tuple[EngineConfig, ...] = setting("The workers, by engine.")
    router: RouterConfig = setting("How a worker is chosen.", factory=_default_router)
    disaggregation: DisaggregationConfig | None = setting(
        "When prefill and decode of a request are at different workers; never by default.", None
    )
    migration: MigrationConfig = setting(
        "What becomes of a request whose worker is lost.", factory=MigrationConfig
    )
    tiers: tuple[TierConfig, ...] = setting("Where KV blocks are kept, fastest first.", ())
    frontend: FrontendConfig = setting("The HTTP front door.", factory=FrontendConfig)
    runtime: RuntimeConfig = setting("Processes and their supervision.", factory=RuntimeConfig)
    log: LogConfig = setting("Logging.", factory=LogConfig)
    tracing: TracingConfig | None = setting("OpenTelemetry; off by default.", None)
    plugins: PluginsConfig = setting("Plugin selection.", factory=PluginsConfig)
