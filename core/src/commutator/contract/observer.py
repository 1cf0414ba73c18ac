"""Observers: metrics, audit logs and traces of a deployment."""

from __future__ import annotations

from typing import Literal, Protocol

from attrs import frozen

from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
from commutator.contract.request import GenerateRequest, RequestOutcome, RequestSummary
from commutator.contract.routing import Decision
from commutator.contract.settings import setting
from commutator.contract.worker import WorkerRecord

__all__ = [
    "OBSERVING_HOOKS",
    "PROMPT_HOOKS",
    "AnswerProgress",
    "AnsweredRequest",
    "Observer",
    "ObserverConfig",
    "PromptObserver",
    "PromptObserverConfig",
]


@frozen(kw_only=True)
class ObserverConfig:
    """Options of every `observers` entry; each observer plugin adds its own."""

    kind: str = setting("The observer plugin.")


@frozen(kw_only=True)
class PromptObserverConfig(ObserverConfig):
    """Options of observers that can read prompts."""

    prompts: bool = setting("Whether it may read prompts.", False)


@frozen(kw_only=True)
class AnsweredRequest:
    """What a client asked a front door, and how that was answered.

    Refusals and acts of administration, too, but no probes.
    """

    request_id: str
    """Names the request in logs and headers."""
    principal: str | None
    """Who sent it; None where nobody is asked, and for credentials that nobody knows."""
    peer: str | None
    """The client's IP address; None on a Unix socket."""
    method: str
    """The verb of HTTP, or what a front door of another protocol has in its place."""
    path: str
    """As the client sent it, cut after 256 characters."""
    model: str
    """The name that the client gave, if such a model is served; otherwise empty."""
    status: int
    """Of HTTP; 499 means that the client went away."""
    reason: str | None
    """Why it was refused or failed: the error's code, for a principal's limit that limit's name."""
    workers: tuple[str, ...]
    """The workers that served it, in this order."""
    prompt_tokens: int
    """Prompt tokens of requests that reached a worker."""
    cached_tokens: int
    """Prompt tokens that the worker found in its KV cache."""
    generated_tokens: int
    """Tokens generated, of all answers."""
    duration_s: float
    """Seconds from the arrival of its headers to its end."""
    body: bytes = b""
    """What the client sent, its prompts among it; empty for who may not read prompts."""


class Observer:
    """Watches the requests and workers of one front-door process. Override what you need.

    One instance is made for each `observers` entry in each front-door process. Every method but
    ``start`` and ``stop`` is an observing hook, which a plugin can also implement as a function.
    All are called in the process's event loop, so they must not block. Arguments are passed by
    name. An exception is logged with the observer's name; the request and the other observers are
    not affected.
    """

    async def start(self) -> None:
        """Called once, before the front door accepts requests: open files and connections.

        The front door does not start when it raises.
        """

    async def stop(self) -> None:
        """Called once, after the last request ended. An exception is logged."""

    def worker_up(self, worker: WorkerRecord) -> None:
        """A worker can be routed to, for the first time or again after draining.

        Called in each front door, as ``worker_down`` is.
        """

    def worker_down(self, worker: WorkerRecord, reason: str) -> None:
        """A worker left routing.

        ``reason``: "lease expired", "stopped", "draining", "failed" or "retired".
        """

    def request_received(self, request: RequestSummary) -> None:
        """A request was validated and tokenized.

        It ends in exactly one ``request_finished`` or ``request_failed``.
        """

    def request_queued(
        self, request: RequestSummary, queue: Literal["router", "prefill"], waited_s: float
    ) -> None:
        """A request that had to wait ``waited_s`` seconds for a worker now has one.

        ``queue``: "router" where every worker was busy, "prefill" where every prefill worker was.
        """

    def request_routed(self, request: RequestSummary, decision: Decision) -> None:
        """A worker was chosen, and gets the request next.

        Called again for each further worker, after ``request_migrated``.
        """

    def disagg_decided(self, request: RequestSummary, answer: DisaggAnswer) -> None:
        """The disaggregation policy answered for a request.

        Only for models with such a policy and a prefill worker; once for each worker that
        ``request_routed`` names.
        """

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        """Both sides of a hand-over ended, successfully or not.

        Once for each try to prefill the request at another worker.
        """

    def request_first_token(self, request: RequestSummary, worker_id: str, ttft_s: float) -> None:
        """The first token came, ``ttft_s`` seconds after the request arrived at routing.

        Time in queues counts.
        """

    def request_migrated(
        self,
        request: RequestSummary,
        from_worker: str,
        to_worker: str,
        reason: str,
        generated_tokens: int,
    ) -> None:
        """Another worker continues a request after ``generated_tokens`` tokens of its answer.

        ``reason``: "connection_lost", "incomplete_stream", "lease_expired", "drained" when the
        worker was stopped while it drained, or "overloaded" when it refused the request.
        """

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        """The engine finished the request."""

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        """The request ended without a complete answer.

        ``error`` is ``asyncio.CancelledError`` when the client disconnected. ``worker_id`` is the
        worker that served it last, None when no worker was chosen.
        """

    def request_answered(self, answered: AnsweredRequest) -> None:
        """A client's request ended, however: once for each, also without any of the above.

        Refused requests and acts of administration come here too, and nowhere else; probes do not.
        """


OBSERVING_HOOKS = tuple(
    name for name in vars(Observer) if not name.startswith("_") and name not in {"start", "stop"}
)
"""The names of the observing hooks, in the order in which a deployment meets them."""


class AnswerProgress(Protocol):
    """An answer while it is generated."""

    @property
    def generated_tokens(self) -> int:
        """Tokens of the answer until now, by all its workers."""


class PromptObserver(Observer):
    """An observer that also gets prompts, where people allowed it: see ``PromptObserverConfig``.

    Its options subclass that class, and only if `prompts` is true there are these methods called,
    and has ``AnsweredRequest`` a body; what is not recorded of a prompt must be forgotten when its
    request ends. They are not for plugins without options.
    """

    def prompt_received(self, request: RequestSummary, prompt: GenerateRequest) -> None:
        """A request came to routing, just before ``request_received``, which has the same summary.

        Not called for a request that a worker gets as the client sent it.
        """

    def answer_begun(self, request: RequestSummary, progress: AnswerProgress) -> None:
        """The request of ``prompt_received`` has its first worker; ``progress`` is its answer's."""


PROMPT_HOOKS = ("prompt_received", "answer_begun")
"""The names of the methods that get prompts."""
