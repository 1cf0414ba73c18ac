"""One request of a client on its way through a front door, whatever door and protocol it uses."""

from __future__ import annotations

import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from multidict import istr

from commutator import tracing
from commutator.contract.answer import AnswerWriter, Failure
from commutator.contract.limiter import Ticket
from commutator.contract.observer import AnsweredRequest
from commutator.contract.principal import ANONYMOUS, Principal
from commutator.contract.protocol import MountedProtocol
from commutator.contract.request import MAX_SESSION_CHARS, AdapterIdentity, Caller
from commutator.contract.traffic import DEFAULT_ALIAS
from commutator.errors import CommutatorError, RequestError
from commutator.frontend.limits import TimeLimit
from commutator.frontend.services import FrontendServices
from commutator.tokenizer.text_model import TextModel

log = logging.getLogger(__name__)

FALLBACK_HEADER = "X-Commutator-Fallback"
"""Why other models did not answer: MODEL REASON of each, in order."""
TIMEOUT_HEADER = "X-Request-Timeout-S"
"""Lowers the longest time that a request may take, in seconds."""

_REFUSED = frozenset({403, 429})
_MAX_PATH = 256
_MAX_HEADER = 256
_EXPLAIN_HEADER = istr("X-Commutator-Explain")  # not folded anew for each request
# Proxies and clients refuse longer headers.
_MAX_HEADER_CHARACTERS = 6_000
_MAX_REASON_CHARACTERS = 200
INLINE_BYTES = 64 << 10
"""Working on this much takes a few milliseconds; a thread costs a fraction of one."""

T = TypeVar("T")
Explanations = list[dict[str, Any]]


class Call(ABC):
    """What a protocol knows of a request, how it answers, and what the log and metrics say of it.

    A door makes one for each request. It is answered once: by ``reply``, or by ``begin``, any
    number of ``write`` and ``end``.
    """

    path_attribute = "http.route"
    """The name of its path in spans."""
    protocol: MountedProtocol | None = None
    """Whose request it is; None on paths of no protocol."""
    principal: Principal = ANONYMOUS
    """Who sent it; ``ANONYMOUS`` where nobody is asked, and until the client was."""
    counts = False
    """Whether the request counts against limits of its principal."""
    ticket: Ticket | None = None
    """Once it is charged."""
    reason: str | None = None
    """Why it was refused or failed."""
    param: str | None = None
    """What of the request was wrong."""
    body = b""
    """What the client sent, once it was read."""
    connection: dict[str, Any] | None = None
    """On a WebSocket what a protocol remembers of it, by names of its own; else None."""
    model = ""
    """Set once a served model is found."""
    user: str | None = None
    alias: str | None = None
    """What the client asked for where that is no model, or stands for others as well."""
    answering = False
    """Whether output of a model was sent, or is about to be: no other model can answer then."""
    served = False
    """Whether it came to a worker; else it is not charged."""
    generating = False
    """A worker may still be generating the answer."""
    prompt_tokens = 0
    cached_tokens = 0
    generated_tokens = 0
    ttft_s: float | None = None
    workers: tuple[str, ...] = ()

    def __init__(
        self,
        services: FrontendServices,
        request_id: str,
        endpoint: str,
        method: str,
        path: str,
        headers: Mapping[str, str],
    ) -> None:
        self.arrived_s = time.perf_counter()
        self.services = services
        self.request_id = request_id
        self.endpoint = endpoint
        """The route, for metrics."""
        self.method = method
        self.path = path
        """As the client wrote it."""
        self.headers = headers
        """The client's headers or metadata; names in any case."""
        self.answer_headers: dict[str, str] = {}
        """To be added to the answer."""
        self._serving: dict[str, tuple[str, TextModel]] = {}
        """What serves a name, by that name; after a fall-back another than before."""
        self._tried: list[str] = []

    # -------------------------------------------------------- what the door gives

    @property
    @abstractmethod
    def peer(self) -> str | None:
        """The client's IP address; None on a Unix socket."""

    @property
    @abstractmethod
    def forwarded(self) -> Sequence[str]:
        """The headers, in lower case, that routing policies and observers see."""

    @property
    def query(self) -> Mapping[str, str]:
        """The parameters after the path."""
        return {}

    @property
    def parts(self) -> Mapping[str, str]:
        """What the client wrote for the names in braces of ``Route.path``."""
        return {}

    @abstractmethod
    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        """Inside, the body may be read and parsed: what the headers say of it is within limits.

        ``types`` are the content types that it may have, such as "text/plain"; by default JSON's.
        Raises ``Failure`` for 413 and 415, OverloadedError.
        """

    @abstractmethod
    async def read(self) -> bytes:
        """The whole body, unpacked, within the door's limits, of any type.

        To be called in ``room_for_body``, which bounds how much is read at the same time, and
        refuses other types. Raises RequestError, ``Failure`` for 408 and 413.
        """

    @abstractmethod
    async def reply(
        self, parts: list[bytes], content_type: str = "application/json; charset=utf-8"
    ) -> None:
        """Answer with all ``parts``. The list is given up as it is sent."""

    def will_stream(self, writer: AnswerWriter) -> None:
        """An answer in pieces is to come. Until it ends the door may send ``writer.ping``.

        Doors that need no such thing do nothing.
        """

    @abstractmethod
    async def begin(
        self,
        content_type: str,
        status: int = 200,
        *,
        failed: Callable[[Failure], bytes] | None = None,
    ) -> None:
        """Begin an answer in pieces. Its headers are sent with its first piece or ping.

        ``failed`` says what ends it if it fails after that; without, the connection is closed.
        """

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Send a piece, no faster than the client reads. Raises ConnectionError."""

    @abstractmethod
    async def end(self, last: bytes = b"") -> None:
        """Send the last piece."""

    @property
    @abstractmethod
    def begun(self) -> bool:
        """Whether the headers of an answer are sent: an error from then on can only end it."""

    # ------------------------------------------------------------- for protocols

    async def off_loop(self, size: int, work: Callable[[], T]) -> T:
        """``work`` on ``size`` bytes, in a thread if it takes long. Raises OverloadedError."""
        return work() if size <= INLINE_BYTES else await self.services.work.run(work)

    def traced(self, name: str, answer: Awaitable[T]) -> Awaitable[T]:
        """``answer``, inside a span of the client's trace if tracing is on."""
        if tracing.tracer is None:
            return answer
        return tracing.in_span(name, self.headers, {self.path_attribute: self.path}, answer)

    def time_limit(self) -> TimeLimit:
        """The deadline of the request: the server's, or an earlier one that the client sent.

        Raises RequestError when the header is not a positive number.
        """
        services, given = self.services, self.headers.get(TIMEOUT_HEADER)
        longest_s = services.config.request_timeout_s
        if given is None:
            return services.time_limits.of(longest_s)
        try:
            timeout_s = float(given)
        except ValueError:
            timeout_s = math.nan
        if not timeout_s > 0:  # also false for NaN
            raise RequestError(
                f"{TIMEOUT_HEADER}: expected a number of seconds above 0, got {given[:40]!r}",
                TIMEOUT_HEADER,
            )
        return services.time_limits.of(min(timeout_s, longest_s))

    def caller(self, user: str | None = None, session_id: str | None = None) -> Caller:
        """The sender, for routing policies and observers.

        ``session_id`` is the body's; without one the headers of the protocol's clients name it.
        """
        sent, principal = self.headers, self.principal
        if session_id is None and self.protocol is not None:
            named = (sent[name] for name in self.protocol.session_headers if name in sent)
            session_id = next(named, "")[:MAX_SESSION_CHARS] or None
        headers = {name: sent[name][:_MAX_HEADER] for name in self.forwarded if name in sent}
        if principal is ANONYMOUS:
            return Caller(user=user, session_id=session_id, headers=headers)
        return Caller(
            user=user,
            session_id=session_id,
            principal=principal.name,
            weight=principal.weight,
            headers=headers,
        )

    def text_model(self, name: str | None, session_id: str | None = None) -> tuple[str, TextModel]:
        """(name, model) that serve a request for ``name``; None: it names no model.

        ``session_id`` as for ``caller``: a session keeps its model. The same for the whole request,
        unless another one takes over (``serve``). Raises RequestError.
        """
        services, alias = self.services, DEFAULT_ALIAS if name is None else name
        if (found := self._serving.get(alias)) is None:
            if services.traffic is not None and alias in services.traffic.aliases:
                self.alias = alias
                key = session_id or self.caller().session_id or self.request_id
                usable = services.models_for(self.principal)
                name = services.traffic.chosen(alias, key, usable) or name
            found = self._serving[alias] = services.text_model(name, self.principal)
        return found

    @property
    def adapter(self) -> AdapterIdentity | None:
        """With which adapter ``model`` serves the request."""
        alias, traffic = self.alias, self.services.traffic
        return None if alias is None or not traffic else traffic.adapter(alias, self.model)

    async def serve(self, name: str | None, attempt: Callable[[str, TextModel], Awaitable[T]]) -> T:
        """What ``attempt`` makes of the ``text_model`` of ``name``, or of one that takes over."""
        while True:
            self.model, text = self.text_model(name)
            try:
                return await attempt(self.model, text)
            except CommutatorError as error:
                if not self._falls_back(error):
                    raise

    def _falls_back(self, error: CommutatorError) -> bool:
        """Whether ``text_model`` names another model now, to serve what ended with ``error``."""
        services, alias, traffic = self.services, self.alias, self.services.traffic
        if alias is None or traffic is None or alias not in traffic.aliases:
            return False
        if self.begun or self.answering:
            return False
        before, _ = self._serving[alias]
        self._tried.append(before)
        usable = services.models_for(self.principal)
        if (other := traffic.after(alias, self._tried, error, usable)) is None:
            return False
        self._serving[alias] = other.model, services.models[other.model]
        told = self.answer_headers.get(FALLBACK_HEADER)
        failed = f"{before} {other.reason}"
        self.answer_headers[FALLBACK_HEADER] = f"{told}, {failed}" if told else failed
        services.metrics.fell_back(alias, before, other.model, other.reason)
        return True

    @property
    def explains(self) -> bool:
        """Whether the client wants to know why its worker was chosen."""
        return self.headers.get(_EXPLAIN_HEADER) == "1"

    def note_routing(self, workers: tuple[str, ...], explain: Callable[[], Explanations]) -> None:
        """Name the workers in the answer's headers to those who may know, and why if they ask."""
        self.workers = workers
        if self.principal.may("explain"):
            self.answer_headers["X-Commutator-Worker"] = ",".join(workers)
        if self.explains:
            self.answer_headers["X-Commutator-Decision"] = _in_one_header(explain())

    def used(self, prompt: int, cached: int, generated: int) -> None:
        """A worker took the request; tokens so far."""
        self.served = True
        self.prompt_tokens, self.cached_tokens, self.generated_tokens = prompt, cached, generated

    # ------------------------------------------------------------------ for doors

    def settle(self) -> None:
        """The request ended: give back what it did not use of its principal's limits."""
        if self.counts:
            tokens = self.prompt_tokens + self.generated_tokens if self.served else None
            self.services.request_limiter.end(self.principal, self.ticket, tokens)

    def account(self, code: int, *, is_quiet: bool, local_user: str | None = None) -> None:
        """Count the request and tell observers, once it was answered with ``code``.

        ``is_quiet``: it is worth a line only if it failed.
        """
        duration_s = time.perf_counter() - self.arrived_s
        services, principal = self.services, None
        services.metrics.request_done(self.endpoint, self.model, code, duration_s)
        if self.alias is not None and self.model:
            services.metrics.alias_served(self.alias, self.model)
        if self.principal is not ANONYMOUS:
            principal = self.principal.name
            services.metrics.principal_usage.add(
                (principal,), 1, self.prompt_tokens, self.cached_tokens, self.generated_tokens
            )
            if code in _REFUSED and self.reason is not None:
                services.metrics.principal_refused(principal, self.reason)
        if not (is_quiet and code < 400):  # noqa: PLR2004 - HTTP's first error
            services.observer.request_answered(
                AnsweredRequest(
                    request_id=self.request_id,
                    principal=principal,
                    peer=self.peer or local_user,
                    method=self.method,
                    path=self.path[:_MAX_PATH],
                    model=self.model,
                    status=code,
                    reason=self.reason,
                    workers=self.workers,
                    prompt_tokens=self.prompt_tokens,
                    cached_tokens=self.cached_tokens,
                    generated_tokens=self.generated_tokens,
                    duration_s=duration_s,
                    body=self.body,
                )
            )
        level = logging.DEBUG if is_quiet else logging.INFO
        if log.isEnabledFor(level):
            log.log(level, "%s", self._log_line(code, duration_s))

    def _log_line(self, code: int, duration_s: float) -> str:
        """One line; values from clients are quoted."""
        parts = [f"{self.endpoint} {code} id={self.request_id} took={duration_s:.3f}s"]
        if not self.endpoint.startswith("/"):
            parts.append(f"path={json.dumps(self.path[:_MAX_PATH])}")
        if self.reason is not None:
            parts.append(f"reason={self.reason}")
        if self.param is not None:
            parts.append(f"param={json.dumps(self.param[:128])}")
        if self.model:
            parts.append(f"model={self.model}")
        if self.workers:
            parts.append(f"worker={','.join(self.workers)}")
            parts.append(
                f"tokens={self.prompt_tokens}+{self.generated_tokens} cached={self.cached_tokens}"
            )
        if self.ttft_s is not None:
            parts.append(f"ttft={self.ttft_s:.3f}s")
        if self.principal is not ANONYMOUS:
            parts.append(f"principal={self.principal.name}")
        if self.user is not None:
            parts.append(f"user={json.dumps(self.user[:128])}")
        return " ".join(parts)


def _in_one_header(explanations: Explanations) -> str:
    """Compact JSON: an object, or for several answers a list of them, cut to what fits."""
    text = _compact(explanations)
    if len(text) > _MAX_HEADER_CHARACTERS:
        # The chosen worker matters most, so leave the others out.
        for one in explanations:
            chosen = [c for c in one["candidates"] if c["worker_id"] == one["worker_id"]]
            left_out = len(one["candidates"]) - len(chosen)
            one["left_out"] = left_out + one.get("left_out", 0)
            one["candidates"] = chosen
            one["reason"] = one["reason"][:_MAX_REASON_CHARACTERS]
        while len(text := _compact(explanations)) > _MAX_HEADER_CHARACTERS:
            explanations = explanations[: len(explanations) // 2]
    return text


def _compact(shown: Explanations) -> str:
    return json.dumps(shown[0] if len(shown) == 1 else shown, separators=(",", ":"))
