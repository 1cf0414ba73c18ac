"""What a front door tells the planner of its requests, and asks it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any
from uuid import uuid4

import msgspec
from attrs import define

from commutator.contract.disagg import HandoverOutcome
from commutator.contract.observer import Observer
from commutator.contract.planner import PlannerConfig
from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.contract.tuning import ArmCounts, Trial, counted, trial_outcome
from commutator.contract.worker import Role
from commutator.demand import ArrivalCounts, DoorReport
from commutator.errors import CommutatorError
from commutator.frames import FrameProtocol, Questions, kind_of
from commutator.registry.claims import PLANNER
from commutator.registry.client import connect
from commutator.registry.hub import connections
from commutator.routing.dispatcher import Dispatcher

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_REPORT_EVERY_S = 1.0
_ANSWER_S = 5.0
_MAX_UNSENT_BYTES = 1 << 20
_NO_ARMS = (ArmCounts(), ArmCounts())


class _Tuned(msgspec.Struct):
    """What the planner tells of tuning."""

    values: dict[str, float] = msgspec.field(default_factory=dict)
    """Of options, where they are not those of the configuration."""
    trial: Trial | None = None
    """A value that some requests get instead."""


@define
class _Waiting:
    request: RequestSummary
    since_s: float
    counted: bool = False


class DemandCounter(Observer):
    """Counts the requests of one front door on arrival, and how they were served."""

    def __init__(
        self,
        planner: PlannerConfig,
        serving: Role,
        clock: Callable[[], float] = time.monotonic,
        others: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """``serving``: the role of the workers that answer; ``others``: for ``planner.meter``."""
        self._targets = planner.targets
        self._serving = serving
        self._clock = clock
        self._roles: dict[Role, ArrivalCounts] = {serving: ArrivalCounts()}
        # By the identity of the summary, which every hook gets; ids may be those of clients.
        self._waiting: dict[int, _Waiting] = {}
        self._ttft_s: dict[int, tuple[RequestSummary, float]] = {}
        self._answers = self._answer_tokens = self._answers_in_time = 0
        self._first_tokens = self._first_tokens_in_time = 0
        self._meter, self._prefill_meter = planner.meter(others), planner.meter(others)
        self._trial: Trial | None = None
        self._arms = _NO_ARMS
        self._tried: dict[int, tuple[RequestSummary, bool]] = {}
        """The requests since the trial began or ended, and whether each has the tried value."""

    def use_trial(self, trial: Trial | None) -> None:
        """Count for ``trial`` the requests that come from now on."""
        if trial != self._trial:
            self._trial, self._arms = trial, _NO_ARMS
            self._tried.clear()

    def _count_for_trial(
        self, request: RequestSummary, ttft_s: float | None, itl_s: float = 0.0
    ) -> None:
        found = self._tried.pop(id(request), None)
        if found is not None:
            outcome = trial_outcome(self._targets, ttft_s, itl_s)
            self._arms = counted(self._arms, found[1], outcome)

    def request_received(self, request: RequestSummary) -> None:
        takes = self._trial is not None and self._trial.takes(request)
        self._tried[id(request)] = request, takes
        now_s = self._clock()
        self._waiting[id(request)] = _Waiting(request, now_s)
        self._roles[self._serving].came(now_s)

    def placed(
        self,
        request: RequestSummary,
        worker_id: str,
        *,
        uncached_tokens: int,
        ahead_tokens: int = 0,
        separate: bool = False,
    ) -> None:
        """A request has a worker, and ``separate``: a prefill worker is to compute its prompt.

        No cache is expected to hold ``uncached_tokens`` of its prompt tokens; the worker has
        ``ahead_tokens`` to compute before.
        """
        waited = self._waiting.pop(id(request), None)
        here = 0 if separate else uncached_tokens
        if waited is not None and not waited.counted:
            self._roles[self._serving].count(here, request.prompt_tokens)
        if self._meter is not None:
            self._meter.began(
                id(request), worker_id, self._clock(), prompt_tokens=here, ahead_tokens=ahead_tokens
            )
        if separate:
            prefill = self._roles.setdefault(Role.PREFILL, ArrivalCounts())
            prefill.came(self._clock())
            prefill.count(uncached_tokens, request.prompt_tokens)

    def request_first_token(self, request: RequestSummary, worker_id: str, ttft_s: float) -> None:
        self._first_tokens += 1
        self._first_tokens_in_time += ttft_s <= self._targets.ttft_s
        self._ttft_s[id(request)] = request, ttft_s
        if self._meter is not None:
            self._meter.answered(id(request), worker_id, self._clock())

    def request_migrated(
        self,
        request: RequestSummary,
        from_worker: str,
        to_worker: str,
        reason: str,
        generated_tokens: int,
    ) -> None:
        self._leave_meter(request)

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        if handover.prefill_s and self._prefill_meter is not None:
            self._prefill_meter.prefilled(handover.prefill_s, handover.prefilled_tokens)

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        _, ttft_s = self._ttft_s.pop(id(request), (None, 0.0))
        itl_s = (outcome.duration_s - ttft_s) / max(1, outcome.generated_tokens - 1)
        self._count_for_trial(request, ttft_s, itl_s)
        if outcome.generated_tokens:
            self._answers += 1
            self._answer_tokens += outcome.generated_tokens
            self._answers_in_time += itl_s <= self._targets.itl_s
        if self._meter is not None:
            self._meter.ended(
                id(request), outcome.worker_id, outcome.generated_tokens, self._clock()
            )

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        if isinstance(error, asyncio.CancelledError):  # its client went away
            self._tried.pop(id(request), None)
        self._count_for_trial(request, None)
        self._ttft_s.pop(id(request), None)
        self._leave_meter(request)
        waited = self._waiting.pop(id(request), None)
        if waited is not None and not waited.counted:
            self._count_unplaced(request)

    def _leave_meter(self, request: RequestSummary) -> None:
        if self._meter is not None:
            self._meter.lost(id(request), self._clock())

    def _count_unplaced(self, request: RequestSummary) -> None:
        """Count a request without a worker: as much of it is cached as of the others."""
        counts = self._roles[self._serving]
        context = counts.context_tokens
        part = counts.prompt_tokens / context if context else 1.0
        counts.count(round(request.prompt_tokens * part), request.prompt_tokens)

    def report(self, door: str, number: int, **seen: Any) -> DoorReport:
        """The report of now; ``seen`` are its loads and cached blocks."""
        now_s = self._clock()
        for one in self._waiting.values():
            if not one.counted:
                one.counted = True
                self._count_unplaced(one.request)
        waiting = self._waiting.values()
        tokens = sum(one.request.prompt_tokens for one in waiting)
        return DoorReport(
            door=door,
            number=number,
            arrived={role: counts.arrivals() for role, counts in self._roles.items()},
            answers=self._answers,
            answer_tokens=self._answer_tokens,
            answers_in_time=self._answers_in_time,
            first_tokens=self._first_tokens,
            first_tokens_in_time=self._first_tokens_in_time,
            waiting_tokens={self._serving: tokens} if tokens else {},
            waiting_requests=len(waiting),
            oldest_wait_s=now_s - min(one.since_s for one in waiting) if waiting else None,
            measured={
                role: dict(one.sums)
                for role, one in ((self._serving, self._meter), (Role.PREFILL, self._prefill_meter))
                if one is not None and one.sums
            },
            trial=0 if self._trial is None else self._trial.number,
            arms=self._arms,
            **seen,
        )

    @property
    def waiting(self) -> int:
        """Requests without a worker."""
        return len(self._waiting)


class PlannerLink:
    """Reports to the acting planner, which the registry names, and asks it for people.

    Without a planner nothing is reported, and no request is affected.
    """

    def __init__(self, name: str, counter: DemandCounter, dispatcher: Dispatcher) -> None:
        self.status: Mapping[str, Any] | None = None
        """What the planner last told of itself; None without a planner."""
        self._name = f"{name}-{uuid4().hex[:8]}"  # a restarted front door counts from 0 again
        self._counter = counter
        self._dispatcher = dispatcher
        self._address: str | None = None
        self._changed = asyncio.Event()
        self._connection: FrameProtocol | None = None
        self._report_number = 0
        self._questions = Questions()
        self._tuned = _Tuned()

    def on_claim(self, name: str, address: str) -> None:
        """Someone holds a name in the registry."""
        if name == PLANNER and address != self._address:
            self._address = address
            self._changed.set()

    async def run(self) -> None:
        """Stay connected to the acting planner and report, until cancelled."""
        found = connections(self._connect, self._on_frame, "the planner cannot be reached")
        async with aclosing(found):
            async for connection, lost in found:
                self._connection = connection
                try:
                    await self._report_until(lost, connection)
                finally:
                    connection.send(["planner", "leave", self._name])
                    self._connection = None
                    self.status = None
                    self._tune(_Tuned(self._tuned.values))  # nobody would end a trial
                    self._questions.fail(CommutatorError("the connection to the planner was lost"))

    async def _connect(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> FrameProtocol:
        """To the planner that acts; waits until one does. Raises RegistryError."""
        while self._address is None:
            await self._changed.wait()
        self._changed.clear()
        return await connect(self._address, on_frame, on_lost)

    async def ask(self, question: str, argument: float | None = None) -> Any:
        """The planner's answer for people. Raises CommutatorError without one."""
        connection = self._connection
        if connection is None:
            raise CommutatorError(
                "no planner is acting: the deployment has none, or it is starting"
            )
        try:
            return await self._questions.ask(
                lambda number: connection.send(["planner", "ask", number, question, argument]),
                _ANSWER_S,
            )
        except TimeoutError as error:
            raise CommutatorError(f"the planner did not answer within {_ANSWER_S:g} s") from error

    async def _report_until(self, lost: asyncio.Event, connection: FrameProtocol) -> None:
        reported_s, waiting = -_REPORT_EVERY_S, 0
        while not lost.is_set() and not self._changed.is_set():
            now_s = time.monotonic()
            # A first request that waits is told at once: it may need a first worker.
            urgent = self._counter.waiting and not waiting
            if urgent or now_s - reported_s >= _REPORT_EVERY_S:
                waiting, reported_s = self._counter.waiting, now_s
                if connection.unsent_bytes < _MAX_UNSENT_BYTES:
                    connection.send(["planner", "report", self._report().pack()])
            await asyncio.sleep(_LOOK_EVERY_S)

    def _report(self) -> DoorReport:
        self._report_number += 1
        loads: dict[str, tuple[int, int]] = {}
        for name, load in self._dispatcher.load.all_own().items():
            worker = name.partition("@")[0]  # the sum of its ranks
            requests, tokens = loads.get(worker, (0, 0))
            loads[worker] = (
                requests + load.active_requests,
                tokens + load.active_prefill_tokens,
            )
        return self._counter.report(
            self._name,
            self._report_number,
            loads=loads,
            cached_blocks=self._dispatcher.cached_blocks(),
        )

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case ["planner", "status", dict() as status]:
                self.status = status
                try:
                    self._tune(msgspec.convert(status.get("tuning") or {}, _Tuned))
                except msgspec.ValidationError as error:
                    log.warning("the planner sent values that are none: %s", error)
            case ["planner", "answer", int(number), value]:
                self._questions.answer(number, value)
            case _:
                log.warning("the planner sent an unknown frame %s", kind_of(frame))

    def _tune(self, tuned: _Tuned) -> None:
        """Use the values of the planner, and the trial; those that cannot be used are not."""
        if tuned == self._tuned:
            return
        self._tuned = tuned
        try:
            self._dispatcher.tune(tuned.values, tuned.trial)
        except Exception:  # a policy that is made with a value may raise anything
            log.exception("values of tuned options cannot be used; all requests stay as they are")
            self._counter.use_trial(None)
        else:
            self._counter.use_trial(tuned.trial)
