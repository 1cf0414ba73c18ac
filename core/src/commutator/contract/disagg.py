"""Disaggregation: prefill and decode of one request on two workers.

A policy decides which requests are disaggregated; a style makes the requests to both workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from attrs import field, frozen

from commutator.contract.request import GenerateRequest
from commutator.contract.routing import RouterConfig, WorkerLoad
from commutator.contract.settings import PositiveSeconds, setting
from commutator.contract.worker import KvTransferInfo, WorkerRecord

__all__ = [
    "DisaggAnswer",
    "DisaggPolicy",
    "DisaggQuestion",
    "DisaggregationConfig",
    "HandoverOutcome",
    "HandoverRequest",
    "HandoverStyle",
    "MeasuredSpeeds",
    "PhaseOutcome",
    "mismatch",
]


@frozen(kw_only=True)
class MeasuredSpeeds:
    """Speeds that a front door has measured; None before the first measurement."""

    prefill_tokens_per_s: float | None = None
    """Prompt tokens per second of a prefill worker that computes one prompt."""
    local_prefill_tokens_per_s: float | None = None
    """Prompt tokens per second of a decode worker that computes a prompt between its decodes."""
    handover_bytes_per_s: float | None = None
    """Bytes per second of a hand-over."""
    handover_latency_s: float | None = None
    """Seconds that a hand-over takes, however small it is."""


@frozen(kw_only=True)
class DisaggQuestion:
    """One request, the decode worker that was chosen for it, and the prefill pool."""

    prompt_tokens: int
    """Length of the prompt."""
    cached_tokens: int
    """Prompt tokens that the decode worker's KV cache holds, as far as the front door knows."""
    decode_load: WorkerLoad
    """Load of the decode worker without this request."""
    prefill_loads: Mapping[str, WorkerLoad]
    """Load of every prefill worker that could serve it, by worker id; never empty."""
    prefill_cached_tokens: int
    """The most prompt tokens that the KV cache of one of them holds, as far as known."""
    queued_prefills: int
    """Requests that wait because every prefill worker is busy."""
    queue_age_s: float
    """Seconds that the oldest of them has waited; 0 when none waits."""
    token_bytes: int
    """KV bytes of one token, in all layers."""
    speeds: MeasuredSpeeds = MeasuredSpeeds()
    """Speeds that this front door has measured so far."""

    @property
    def uncached_tokens(self) -> int:
        """Prompt tokens that the decode worker would have to compute."""
        return max(0, self.prompt_tokens - self.cached_tokens)


@frozen(kw_only=True)
class DisaggAnswer:
    """Whether a request is disaggregated, and why."""

    separate: bool
    """True: a prefill worker computes the prompt. False: the decode worker does."""
    reason: str
    """One or two words, one of few values, for metrics: "short prompt", "queue full"."""
    terms: Mapping[str, float] = field(factory=dict)
    """The numbers that the decision compares, by name; for people."""


class DisaggPolicy(ABC):
    """Decides for each request whether it is disaggregated. It does no I/O and reads no clock.

    One instance serves one model in one front-door process. The same instance serves the live
    system and the simulator.
    """

    @abstractmethod
    def decide(self, question: DisaggQuestion) -> DisaggAnswer:
        """The decision. Called only while a prefill worker is up and not draining."""


@frozen(kw_only=True)
class HandoverRequest:
    """One disaggregated request and the two workers that serve it."""

    handover_id: str
    """Unique for each try of each request."""
    request: GenerateRequest
    """The request as a single worker would get it."""
    prefill: WorkerRecord
    """The worker that computes the prompt."""
    decode: WorkerRecord
    """The worker that generates the answer."""
    prefill_rank: int = 0
    """Data-parallel rank of the prefill worker, from 0."""
    decode_rank: int = 0
    """Data-parallel rank of the decode worker, from 0."""
    timeout_s: float = 60.0
    """Seconds for which the decode worker may wait for the KV."""


PhaseOutcome = Literal["done", "failed", "cancelled", "refused"]
"""How one side of a hand-over ended.

"done": it succeeded. "failed": the worker failed or was lost, or the KV did not arrive.
"cancelled": it was stopped, because the other side failed or the client disconnected. "refused":
the worker was full and did not begin.
"""


@frozen(kw_only=True)
class HandoverOutcome:
    """How one try to prefill a request at one worker and decode it at another ended."""

    prefill_worker: str
    """Id of the worker that was to compute the prompt."""
    decode_worker: str | None
    """None when no request was sent to a decode worker: the prefill failed before."""
    prefill: PhaseOutcome
    """How the prefill ended."""
    decode: PhaseOutcome | None
    """"done" means that the KV arrived, not that the answer is complete; None without a worker."""
    handover_s: float | None
    """Seconds from the end of the prefill to the first token of the decode worker; None without."""
    size_bytes: int
    """KV bytes of the prompt that the decode worker took over; 0 when the hand-over failed."""
    cancel_s: float | None
    """Seconds from the failure of one side until the other had stopped; None without a failure."""
    prefill_s: float | None = None
    """Seconds that the prefill worker took, from when it got the prompt; None if it failed."""
    prefilled_tokens: int = 0
    """Prompt tokens that it was expected to compute in this time, those of prompts before it
    included."""


class HandoverStyle(ABC):
    """Makes the prefill and the decode request. It does no I/O and has no state."""

    sequential: ClassVar[bool]
    """True: the decode request is sent when the prefill has ended. False: both are sent at once."""

    @abstractmethod
    def prefill_request(self, handover: HandoverRequest) -> GenerateRequest:
        """The request to the prefill worker. The tokens that it generates are discarded."""

    @abstractmethod
    def decode_request(
        self, handover: HandoverRequest, handed: Mapping[str, Any] | None
    ) -> GenerateRequest:
        """The request to the decode worker, whose stream goes to the client.

        ``handed`` is ``TokenDelta.handover`` of the prefill's last delta; None when the style is
        not sequential. Raises EngineHandoverError when it is sequential and ``handed`` is None.
        """

    def mismatch(self, prefill: KvTransferInfo, decode: KvTransferInfo) -> str | None:
        """Why the decode worker cannot use the prefill worker's KV; None if it can.

        Default: everything but the address must be equal. A style that converts sizes overrides it.
        """
        return mismatch(prefill, decode, "protocol", "identity", "block_size", "token_bytes",
                        "tensor_parallel_size")  # fmt: skip


def mismatch(prefill: KvTransferInfo, decode: KvTransferInfo, *names: str) -> str | None:
    """A sentence about the first of the named fields that differs; None if all are equal."""
    for name in names:
        here, there = getattr(prefill, name), getattr(decode, name)
        if here != there:
            return f"{name} is {here} at the prefill worker and {there} at the decode worker"
    return None


def _default_router() -> RouterConfig:
    return RouterConfig(kind="round_robin")


@frozen(kw_only=True)
class DisaggregationConfig:
    """Options of every disaggregation policy; each plugin adds its own."""

    kind: str = setting("The policy plugin that decides for each request.")
    router: RouterConfig = setting(
        "How a prefill worker is chosen, and with `busy` the prefill queue. By default as the "
        "decode worker, with at most 4 requests in flight for each prefill worker.",
        factory=_default_router,
    )
    on_failure: Literal["fail", "prefill_locally", "another_worker"] = setting(
        "When the KV does not arrive: the client gets the error (fail), the decode worker computes "
        "the prompt (prefill_locally), or one more prefill worker is tried before that.",
        "prefill_locally",
    )
    timeout_s: PositiveSeconds = setting(
        "Longest time that a decode worker waits for the KV.", 60.0
    )
