"""The live view of a run, over HTTP: what the page at /ui and ``commutator top`` show.

    GET /admin/live        server-sent events: a snapshot of the whole run every second
    GET /admin/live/door   what this front-door process alone knows; JSON
    GET /admin/live/decision?request=ID
                           the candidates of one of the last requests, with their scores; JSON

Nothing is done for it while nobody watches: no hook is listened to, and no clock runs. What is
shown then comes from counters that are counted anyway, and from hooks. A front door asks its
siblings on their Unix sockets for their parts, so each one shows the whole run.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

import aiohttp
import attrs
import msgspec
from aiohttp import web

import commutator
from commutator.contract.disagg import DisaggAnswer, HandoverOutcome
from commutator.contract.observer import Observer
from commutator.contract.operations import (
    Operations,
    OperationsContext,
    OperationsDoor,
    OperationsRoute,
)
from commutator.contract.request import RequestOutcome, RequestSummary
from commutator.contract.routing import Decision
from commutator.contract.worker import EngineLoad, WorkerRecord
from commutator.errors import OverloadedError, RequestError
from commutator.frontend import FrontendServices
from commutator.routing.workers import WorkerStatus
from commutator_console.page import page_routes
from commutator_console.preview import preview_route
from commutator_console.snapshot import (
    DecisionRow,
    DoorPart,
    Event,
    RateWindow,
    RequestRow,
    cache_hits,
    changes,
    decision_row,
    door_totals,
    flows,
    handovers,
    kv_totals,
    latest,
    planning,
    principals,
    requests,
    unready_row,
    worker_row,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

LIVE_PATH = "/admin/live"

_EVERY_S = 1.0
_WINDOW_S = 10.0
_MOST_WATCHERS = 16
_MOST_WORKERS = 2000
_MOST_UNREADY = 200
_MOST_ASKED = 64
"""Workers that are asked for their load at each snapshot; of more, the next ones each time."""
_MOST_ROWS = 50
_MOST_EVENTS = 30
_MOST_SCORED = 12
"""Candidates of a decision that are kept."""
_MOST_PAIRS = 256
_MOST_PRINCIPALS = 50
_MOST_WARNINGS = 20
_MOST_CHARACTERS = 300
_SIBLING_TIMEOUT_S = 0.8
_LOAD_TIMEOUT_S = 0.5
_LEASE_S = 5.0
"""Hooks are listened to for this long after the last question."""
_READS_S = 10.0
"""A watcher that takes longer to read a snapshot is disconnected."""


class Recorder(Observer):
    """Keeps the last requests and events of one front door, while somebody watches."""

    def __init__(self, now_unix_s: Callable[[], float] = time.time) -> None:
        self.routed = 0
        self.handovers: dict[str, dict[str, dict[str, float]]] = {}
        """Counts by prefill worker and decode worker."""
        self.rows: OrderedDict[str, RequestRow] = OrderedDict()
        """By request id."""
        self.decisions: dict[str, DecisionRow] = {}
        """The last one of each request of ``rows``."""
        self.events: deque[Event] = deque(maxlen=_MOST_EVENTS)
        self._now_unix_s = now_unix_s
        self._pairs = 0
        self._states: dict[str, tuple[str, str]] = {}

    def look(self, statuses: Iterable[WorkerStatus]) -> None:
        """Notes drains and changes of roles since the last look."""
        now = {one.worker_id: (one.state, str(one.role)) for one in statuses}
        for kind, text in changes(self._states, now):
            self._event(kind, text)
        self._states = now

    def worker_up(self, worker: WorkerRecord) -> None:
        self._event("worker up", f"{worker.worker_id} takes requests for {worker.model}")

    def worker_down(self, worker: WorkerRecord, reason: str) -> None:
        if reason != "draining":  # ``look`` tells of those
            self._event("worker down", f"{worker.worker_id}: {reason}")

    def request_routed(self, request: RequestSummary, decision: Decision) -> None:
        self.routed += 1
        self.decisions[request.request_id] = decision_row(
            request.request_id, decision, _MOST_SCORED
        )
        known = self.rows.get(request.request_id)
        if known is not None:  # it migrated
            known.worker_id, known.policy = decision.worker_id, decision.policy
            known.reason = _cut(decision.reason)
            return
        self.rows[request.request_id] = RequestRow(
            request_id=request.request_id,
            time_unix_s=self._now_unix_s(),
            model=request.model,
            principal=request.principal,
            prompt_tokens=request.prompt_tokens,
            worker_id=decision.worker_id,
            policy=decision.policy,
            reason=_cut(decision.reason),
        )
        if len(self.rows) > _MOST_ROWS:
            oldest, _ = self.rows.popitem(last=False)
            self.decisions.pop(oldest, None)

    def disagg_decided(self, request: RequestSummary, answer: DisaggAnswer) -> None:
        if (row := self.rows.get(request.request_id)) is not None:
            where = "elsewhere" if answer.separate else "here"
            row.disaggregation = _cut(f"prefill {where}: {answer.reason}")

    def kv_handed_over(self, request: RequestSummary, handover: HandoverOutcome) -> None:
        prefill, decode = handover.prefill_worker, handover.decode_worker
        done = handover.decode == "done"
        if done and (row := self.rows.get(request.request_id)) is not None:
            row.prefill_worker = prefill
        if decode is None:
            return
        pair = self.handovers.get(prefill, {}).get(decode)
        if pair is None:
            if self._pairs >= _MOST_PAIRS:
                return
            self._pairs += 1
            pair = {"count": 0.0, "bytes": 0.0, "failed": 0.0}
            self.handovers.setdefault(prefill, {})[decode] = pair
        if done:
            pair["count"] += 1
            pair["bytes"] += handover.size_bytes
        else:
            pair["failed"] += 1

    def request_first_token(self, request: RequestSummary, worker_id: str, ttft_s: float) -> None:
        if (row := self.rows.get(request.request_id)) is not None:
            row.ttft_s = ttft_s

    def request_migrated(
        self,
        request: RequestSummary,
        from_worker: str,
        to_worker: str,
        reason: str,
        generated_tokens: int,
    ) -> None:
        if (row := self.rows.get(request.request_id)) is not None:
            row.migrated_from.append(from_worker)
        text = f"a request went from {from_worker} to {to_worker} after {generated_tokens} tokens"
        self._event("migration", f"{text}: {reason}")

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        if (row := self.rows.get(request.request_id)) is not None:
            row.state = "done"
            row.cached_tokens = outcome.cached_tokens
            row.generated_tokens = outcome.generated_tokens
            row.duration_s = outcome.duration_s

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        if (row := self.rows.get(request.request_id)) is not None:
            row.state = "failed"
            gone = isinstance(error, asyncio.CancelledError)
            row.error = "the client disconnected" if gone else _cut(str(error))

    def _event(self, kind: str, text: str) -> None:
        self.events.append(Event(time_unix_s=self._now_unix_s(), kind=kind, text=_cut(text)))


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 1]}…"


class LiveFeed:
    """The live view of one front-door process: its own part, and snapshots of the whole run.

    Used from one event loop. One is made for each process, whatever the number of its addresses.
    """

    def __init__(
        self,
        services: FrontendServices,
        local_socket: str | None = None,
        *,
        every_s: float = _EVERY_S,
        lease_s: float = _LEASE_S,
    ) -> None:
        """``local_socket`` is this process's Unix socket, beside those of its siblings.

        Without it, only this process is shown.
        """
        self._services = services
        self._socket = None if local_socket is None else Path(local_socket)
        self._name = "frontend" if self._socket is None else self._socket.stem
        self._every_s = every_s
        self._lease_s = lease_s
        self._recorder: Recorder | None = None
        self._detach: Callable[[], None] = lambda: None
        self._instance = ""
        self._asked_s = -math.inf
        self.watchers = 0
        self._watching: asyncio.Task[None] | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._doors = RateWindow(_WINDOW_S)
        self._kv = RateWindow(_WINDOW_S)
        self._loads: dict[str, EngineLoad] = {}
        self._asked = 0

    async def part(self) -> DoorPart:
        """What this process alone knows. For ``lease_s`` from now it records requests."""
        return self._part(await self._statuses())

    def _part(self, statuses: Sequence[WorkerStatus]) -> DoorPart:
        loop = asyncio.get_running_loop()
        self._asked_s = loop.time()
        if self._recorder is None:
            self._recorder = Recorder()
            self._detach = self._services.dispatcher.observe(self._recorder)
            self._instance = f"{os.getpid()}-{self._asked_s}"
            loop.call_later(self._lease_s, self._end_lease)
        services, recorder = self._services, self._recorder
        recorder.look(statuses)
        own = {one.worker_id: one.active_requests for one in statuses if one.active_requests}
        totals = services.metrics.totals()
        totals |= {"routed": recorder.routed, "handovers": recorder.handovers}
        return DoorPart(
            door=self._name,
            instance=self._instance,
            draining=services.draining,
            running=services.limiter.running,
            queued=services.limiter.waiting,
            waiting=sum(map(services.dispatcher.waiting, services.models)),
            in_flight=own,
            # What is counted goes on counting, but a window compares it with later values.
            totals=msgspec.json.decode(msgspec.json.encode(totals)),
            recent=[attrs.evolve(row) for row in recorder.rows.values()],
            events=list(recorder.events),
        )

    def own_decision(self, request_id: str) -> DecisionRow | None:
        """The last decision about a request that this process has routed, while it is kept."""
        return None if self._recorder is None else self._recorder.decisions.get(request_id)

    async def decision(self, request_id: str) -> DecisionRow | None:
        """The same, of any front door of this host."""
        if (own := self.own_decision(request_id)) is not None:
            return own
        query = urlencode({"request": request_id, "own": 1})
        path = f"{LIVE_PATH}/decision?{query}"
        found = await asyncio.gather(
            *(_asked(one, path, DecisionRow) for one in self._sibling_sockets())
        )
        return next((one for one in found if one is not None), None)

    def _end_lease(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = self._asked_s + self._lease_s - loop.time()
        if left_s > 0:
            loop.call_later(left_s, self._end_lease)
            return
        self._detach()
        self._recorder = None

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[AsyncIterator[bytes]]:
        """Snapshots as JSON, the newest each time: one that is read slowly misses some.

        The iterator ends when the process is about to end. Raises OverloadedError when too many
        watch.
        """
        if self.watchers >= _MOST_WATCHERS:
            raise OverloadedError(
                f"{self.watchers} others watch this front door live, as many as may; close a page "
                "or end a `commutator top`",
                reason="too_many_watchers",
            )
        self.watchers += 1
        if self._watching is None:
            self._next = asyncio.get_running_loop().create_future()
            self._watching = asyncio.create_task(self._run())
        try:
            yield self._snapshots()
        finally:
            self.watchers -= 1
            if not self.watchers:
                self._watching.cancel()
                self._watching = self._next = None
                self._doors.clear()
                self._kv.clear()
                self._loads.clear()

    async def _snapshots(self) -> AsyncIterator[bytes]:
        while not self._services.draining:
            assert self._next is not None
            yield await asyncio.shield(self._next)

    async def _run(self) -> None:
        """Make snapshots until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            made, self._next = self._next, loop.create_future()
            assert made is not None
            try:
                found = await self.snapshot()
            except Exception as error:  # noqa: BLE001 - the watchers are told
                made.set_exception(error)
                made.exception()  # none of them may be waiting for it now
            else:
                made.set_result(found)
            await asyncio.sleep(max(self._every_s / 5, began_s + self._every_s - loop.time()))

    async def snapshot(self) -> bytes:
        """The state of the whole run, as JSON."""
        services, dispatcher = self._services, self._services.dispatcher
        siblings, statuses = await asyncio.gather(self._siblings(), self._statuses())
        parts = [self._part(statuses), *siblings]
        now_s = asyncio.get_running_loop().time()
        self._doors.add(now_s, door_totals(parts))
        self._kv.add(now_s, kv_totals(dispatcher.poll.kv))
        counted, moved = self._doors.total(), self._kv.by_source()
        doors_s, kv_s = self._doors.elapsed_s, self._kv.elapsed_s
        busiest, others = principals(counted, doors_s, _MOST_PRINCIPALS)
        recent, events = latest(parts, _MOST_ROWS)
        block_sizes = {one.worker_id: one.block_size for one in statuses}
        warnings = [
            _cut(f"{warning.worker_id}: {warning.message}")
            for warning in dispatcher.warnings()[:_MOST_WARNINGS]
        ]
        found = [_cut(text) for text in islice(services.problems(), _MOST_WARNINGS)]
        status = "degraded" if found or not dispatcher.ready() else "ready"
        unready = list(services.unready_workers())
        return msgspec.json.encode(
            {
                "time_unix_s": time.time(),
                "window_s": doors_s,
                "version": commutator.__version__,
                "status": "draining" if services.draining else status,
                "models": list(services.models),
                "doors": [
                    {"door": part.door, "draining": part.draining, "running": part.running}
                    for part in parts
                ],
                "supervised": services.registry_address is not None,
                "doors_not_shown": max(0, self._doors_known() - len(parts)),
                "requests": requests(counted, doors_s, parts),
                "cache": cache_hits(counted, moved, block_sizes),
                "workers": [
                    *await self._worker_rows(statuses[:_MOST_WORKERS], parts),
                    *map(unready_row, unready[:_MOST_UNREADY]),
                ],
                "workers_left_out": max(0, len(statuses) - _MOST_WORKERS)
                + max(0, len(unready) - _MOST_UNREADY),
                "planner": None if services.planner is None else planning(services.planner.status),
                "flows": flows(moved, kv_s),
                "handovers": handovers(counted, doors_s, _MOST_ROWS),
                "principals": busiest,
                "principals_left_out": others,
                "recent": recent,
                "events": events[:_MOST_EVENTS],
                "problems": found,
                "warnings": warnings,
            }
        )

    def _doors_known(self) -> int:
        """How many front doors there should be, as far as this one knows."""
        return max(self._services.config.replicas, self._services.dispatcher.load.peers + 1)

    async def _statuses(self) -> list[WorkerStatus]:
        found: list[WorkerStatus] = []
        for statuses in self._services.dispatcher.statuses():
            found += statuses
            await asyncio.sleep(0)  # others are served meanwhile
        return found

    async def _worker_rows(
        self, statuses: Sequence[WorkerStatus], parts: Sequence[DoorPart]
    ) -> list[msgspec.Raw]:
        await self._ask_loads([one.worker_id for one in statuses])
        kv = self._services.dispatcher.poll.kv
        rows = []
        for number, status in enumerate(statuses):
            name = status.worker_id
            in_flight = sum(part.in_flight.get(name, 0) for part in parts)
            load = self._loads.get(name)
            row = worker_row(status, in_flight, load, kv.get(name))
            rows.append(msgspec.Raw(msgspec.json.encode(row)))
            if number % _MOST_ASKED == 0:
                await asyncio.sleep(0)
        return rows

    async def _ask_loads(self, names: Sequence[str]) -> None:
        """Ask the next workers for their load, and forget that of workers that are gone."""
        first = self._asked if self._asked < len(names) else 0
        self._asked = first + _MOST_ASKED
        asked = names[first : self._asked]
        found = await self._services.dispatcher.engine_loads(asked, timeout_s=_LOAD_TIMEOUT_S)
        kept = set(names) - set(asked)
        self._loads = {name: load for name, load in self._loads.items() if name in kept} | found

    async def _siblings(self) -> list[DoorPart]:
        """The parts of the other front doors, without those that do not answer in time."""
        path = f"{LIVE_PATH}/door"
        found = await asyncio.gather(
            *(_asked(one, path, DoorPart) for one in self._sibling_sockets())
        )
        return [part for part in found if part is not None]

    def _sibling_sockets(self) -> list[Path]:
        if self._socket is None or self._services.config.replicas == 1:
            return []
        return sorted(set(self._socket.parent.glob(f"*{self._socket.suffix}")) - {self._socket})


async def _asked(socket: Path, path: str, kind: type[_T]) -> _T | None:
    """The answer of another front door; None if it has none, or not in time."""
    timeout = aiohttp.ClientTimeout(total=_SIBLING_TIMEOUT_S)
    connector = aiohttp.UnixConnector(str(socket))
    with suppress(aiohttp.ClientError, OSError, msgspec.MsgspecError):  # TimeoutError is an OSError
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
            session.get(f"http://localhost{path}") as answer,
        ):
            if answer.ok:
                return msgspec.json.decode(await answer.read(), type=kind)
    return None


def live_routes(feed: LiveFeed) -> Iterable[OperationsRoute]:
    """The routes of this page."""

    async def live(request: web.Request) -> web.StreamResponse:
        async with feed.watch() as snapshots:
            response = web.StreamResponse(headers=_STREAM)
            await response.prepare(request)
            async for data in snapshots:
                await _send(request, response, b"event: snapshot\ndata: %b\n\n" % data)
        await _send(request, response, b"event: end\ndata: {}\n\n")
        return response

    async def door(_: web.Request) -> web.Response:
        body = msgspec.json.encode(await feed.part())
        return web.Response(body=body, content_type="application/json")

    async def decision(request: web.Request) -> web.Response:
        asked = request.query.get("request", "")
        found = feed.own_decision(asked) if "own" in request.query else await feed.decision(asked)
        if found is None:
            text = "no decision about this request is kept: only the last ones are, while watched"
            raise RequestError(text, "request", "decision_not_found")
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    return [
        OperationsRoute(method="GET", path=path, needs="watch", handle=handle)
        for path, handle in (
            (LIVE_PATH, live),
            (f"{LIVE_PATH}/door", door),
            (f"{LIVE_PATH}/decision", decision),
        )
    ]


_STREAM = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # proxies pass each snapshot on at once
}


async def _send(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Raises ConnectionResetError for a client that does not read."""
    try:
        async with asyncio.timeout(_READS_S):
            await response.write(data)
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("a watcher of the live view does not read") from None


class Console(Operations):
    """The live view, and the page that shows it. All doors of a process share one feed."""

    def __init__(self, context: OperationsContext) -> None:
        self._services: FrontendServices = context.services
        self.feed = LiveFeed(context.services, context.local_socket)

    def routes(self, door: OperationsDoor) -> Iterator[OperationsRoute]:
        yield from live_routes(self.feed)
        yield preview_route(self._services)
        yield from page_routes(chat=door.serves_clients, needs_key=door.needs_key)
