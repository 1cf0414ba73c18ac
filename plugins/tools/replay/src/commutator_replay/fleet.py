"""Several workers in virtual time, and the KV blocks that move between them. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

from attrs import define, evolve, frozen

from commutator import (
    EngineClient,
    EngineInfo,
    EngineLoad,
    GenerateRequest,
    TokenStream,
    WorkerRecord,
)
from commutator.contract.worker import Role
from commutator.errors import EngineError
from commutator.routing.workers import LiveWorker
from commutator_replay.trace import TRACE_BLOCK_TOKENS
from commutator_replay.virtual import (
    BlocksPulled,
    BlocksReady,
    RequestDone,
    VirtualEngine,
    VirtualEvent,
    VirtualRequest,
)


@define
class _Handover:
    prefill_id: str
    decode_id: str
    sides: int = 2
    """Sides (prefill, decode) that have not ended."""


class VirtualFleet:
    """Advances every worker's time, in step where one waits for another.

    A worker that takes part in no hand-over is advanced only when a request arrives, because it
    does not affect the others; unless they are to be kept in step.
    """

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        tell: Callable[[str, VirtualEvent], None],
    ) -> None:
        """``tell`` is called with a worker's id and each event; it may submit and set alarms."""
        self._engines = dict(engines)
        self._tell = tell
        self._handovers: dict[int, _Handover] = {}
        self._taking_part: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        """Requests at each worker."""
        self._awake: dict[str, None] = {}
        """Workers for which anything may be left to do."""
        self.in_step = False
        """Whether to advance all workers in step, while what each does may matter to a request."""
        self._alarms: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = count()
        self.now_ns = 0

    def submit(self, worker_id: str, key: int, request: VirtualRequest) -> None:
        """Send a request to a worker now. Raises ValueError if it can never serve it."""
        self._catch_up(worker_id).submit(key, request)
        self._requests[worker_id] += 1

    def hand_over(self, prefill_id: str, decode_id: str, key: int, request: VirtualRequest) -> None:
        """Begin prefill and decode of a request now; decode is offered blocks as they come."""
        self._handovers[key] = _Handover(prefill_id, decode_id)
        self._taking_part.update((prefill_id, decode_id))
        self.submit(decode_id, key, evolve(request, pulls=True))
        self.submit(prefill_id, key, evolve(request, output_tokens=1, exports=True))

    def add(self, worker_id: str, engine: VirtualEngine) -> None:
        """A worker comes, and its time begins now."""
        engine.advance(self.now_ns)
        self._engines[worker_id] = engine

    def is_idle(self, worker_id: str) -> bool:
        """Whether the worker takes part in no hand-over, nor holds blocks for one."""
        return worker_id not in self._taking_part and all(
            handover.prefill_id != worker_id for handover in self._handovers.values()
        )

    def remove(self, worker_id: str) -> None:
        """A worker goes, which must be idle and have no requests. Not during a step of time."""
        del self._engines[worker_id]
        self._awake.pop(worker_id, None)

    def catch_up(self) -> None:
        """Advance every worker to now."""
        for worker_id in list(self._engines):
            self._advance(worker_id, self.now_ns)

    def alarm(self, time_ns: int, call: Callable[[], None]) -> None:
        """Call ``call`` at that time, after every worker in a hand-over has been advanced to it."""
        heapq.heappush(self._alarms, (time_ns, next(self._serial), call))

    def pass_time(self, until_ns: int | None) -> None:
        """Advance to ``until_ns``; None: until nothing is left to do."""
        while (time_ns := self._next_ns()) is not None:
            if until_ns is not None and time_ns > until_ns:
                break
            self.now_ns = time_ns
            for worker_id in self._stepping():
                self._catch_up(worker_id)
            while self._alarms and self._alarms[0][0] <= time_ns:
                heapq.heappop(self._alarms)[2]()
        if until_ns is not None:
            self.now_ns = until_ns
        # In the fleet's order, so that the outcome does not depend on who was awake when.
        for worker_id in [one for one in self._engines if one in self._awake]:
            self._advance(worker_id, until_ns)
            if not self._requests[worker_id] and self._sleeps(worker_id):
                del self._awake[worker_id]

    def _sleeps(self, worker_id: str) -> bool:
        """Whether nothing will happen at a worker without requests, such as a store to a tier."""
        engine = self._engines[worker_id]
        return engine.token_bytes is not None and engine.next_event_ns() is None

    def _next_ns(self) -> int | None:
        """The time of the next event that affects more than one worker, or of the next alarm."""
        self._settle()
        found = (self._engines[worker_id].next_event_ns() for worker_id in self._stepping())
        times = [time_ns for time_ns in found if time_ns is not None]
        if self._alarms:
            times.append(self._alarms[0][0])
        return min(times, default=None)

    def _stepping(self) -> list[str]:
        return list(self._engines if self.in_step else self._taking_part)

    def _settle(self) -> None:
        """Begin every step that is due now, until none causes another one at another worker."""
        happened = True
        while happened:
            happened = False
            for worker_id in self._stepping():
                self._engines[worker_id].next_event_ns()
                happened |= self._advance(worker_id, self.now_ns)

    def _catch_up(self, worker_id: str) -> VirtualEngine:
        self._advance(worker_id, self.now_ns)
        self._awake[worker_id] = None
        return self._engines[worker_id]

    def _advance(self, worker_id: str, until_ns: int | None) -> bool:
        """Returns whether anything happened."""
        events = self._engines[worker_id].advance(until_ns)
        for event in events:
            match event:
                case BlocksReady(key, blocks):
                    handover = self._handovers[key]
                    self._catch_up(handover.decode_id).offer(key, blocks)
                case BlocksPulled(key):
                    self._catch_up(self._handovers[key].prefill_id).release(key)
                    self._leave(worker_id, key)
                case RequestDone(key=key):
                    self._requests[worker_id] -= 1
                    if self._is_prefill(worker_id, key):
                        self._leave(worker_id, key)
            self._tell(worker_id, event)
        return bool(events)

    def _is_prefill(self, worker_id: str, key: int) -> bool:
        handover = self._handovers.get(key)
        return handover is not None and handover.prefill_id == worker_id

    def _leave(self, worker_id: str, key: int) -> None:
        """The worker's side has ended."""
        self._taking_part[worker_id] -= 1
        if not self._taking_part[worker_id]:
            del self._taking_part[worker_id]
        handover = self._handovers[key]
        handover.sides -= 1
        if not handover.sides:
            del self._handovers[key]


def virtual_live_worker(
    worker_id: str, block_size: int = TRACE_BLOCK_TOKENS, role: Role = Role.BOTH
) -> LiveWorker:
    """A worker that can be routed to, with nothing behind it."""
    info = EngineInfo(
        kind="virtual",
        version="1",
        model="model",
        max_model_len=1 << 20,
        block_size=block_size,
        kv_capacity_blocks=1 << 20,
    )
    record = WorkerRecord(
        worker_id=worker_id,
        engine="virtual",
        kind="virtual",
        model="model",
        address="",
        info=info,
        role=role,
    )
    return LiveWorker(record, _NoClient(), connected=True)


@frozen(eq=False)
class VirtualWorker:
    """An engine, and the record by which it can be routed to."""

    worker_id: str
    engine: VirtualEngine
    live: LiveWorker

    @classmethod
    def make(cls, worker_id: str, engine: VirtualEngine, role: Role = Role.BOTH) -> VirtualWorker:
        return cls(worker_id, engine, virtual_live_worker(worker_id, engine.block_size, role))

    @property
    def role(self) -> Role:
        return self.live.record.role


class _NoClient(EngineClient):
    """The client of a worker that has no server."""

    async def start(self) -> EngineInfo:
        raise EngineError("a virtual worker cannot be connected to")

    def generate(self, request: GenerateRequest) -> TokenStream:
        raise EngineError("a virtual worker generates nothing")

    async def load(self) -> EngineLoad:
        return EngineLoad()

    async def close(self) -> None:
        pass
