"""Workers in virtual time together, and the KV blocks that go from one to another. Pure."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import count

from attrs import define, evolve

from commutator.engine.virtual import (
    BlocksPulled,
    BlocksReady,
    RequestDone,
    VirtualEngine,
    VirtualEvent,
    VirtualRequest,
)

__all__ = ["VirtualFleet"]


@define
class _Handover:
    prefill_id: str
    decode_id: str
    legs: int = 2
    """Those of which the fleet still waits for something."""


class VirtualFleet:
    """Lets time pass at every worker, in step where one waits for another.

    A worker that takes part in no hand-over is brought to the present only when it is asked for
    something: nothing that it does concerns the others.
    """

    def __init__(
        self,
        engines: Mapping[str, VirtualEngine],
        tell: Callable[[str, VirtualEvent], None],
    ) -> None:
        """``tell`` hears what happened, with the worker's id; it may submit, and set alarms."""
        self._engines = engines
        self._tell = tell
        self._handovers: dict[int, _Handover] = {}
        self._taking_part: Counter[str] = Counter()
        self._alarms: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = count()
        self.now_ns = 0

    def submit(self, worker_id: str, key: int, request: VirtualRequest) -> None:
        """A worker gets a request now. Raises ValueError when it can never serve it."""
        self._catch_up(worker_id).submit(key, request)

    def hand_over(self, prefill_id: str, decode_id: str, key: int, request: VirtualRequest) -> None:
        """Begin both legs of a request now; the decode leg is told of what is ready."""
        self._handovers[key] = _Handover(prefill_id, decode_id)
        self._taking_part.update((prefill_id, decode_id))
        self.submit(decode_id, key, evolve(request, pulls=True))
        self.submit(prefill_id, key, evolve(request, output_tokens=1, exports=True))

    def alarm(self, time_ns: int, call: Callable[[], None]) -> None:
        """Call back at that time, with every worker that takes part in a hand-over there, too."""
        heapq.heappush(self._alarms, (time_ns, next(self._serial), call))

    def pass_time(self, until_ns: int | None) -> None:
        """Let time pass until then; None: until nothing is left to do."""
        while (time_ns := self._next_ns()) is not None:
            if until_ns is not None and time_ns > until_ns:
                break
            self.now_ns = time_ns
            for worker_id in list(self._taking_part):
                self._catch_up(worker_id)
            while self._alarms and self._alarms[0][0] <= time_ns:
                heapq.heappop(self._alarms)[2]()
        if until_ns is not None:
            self.now_ns = until_ns
        for worker_id in self._engines:
            self._advance(worker_id, until_ns)

    def _next_ns(self) -> int | None:
        """When the next thing happens that more than one worker has to do with."""
        self._settle()
        found = (self._engines[worker_id].next_event_ns() for worker_id in self._taking_part)
        times = [time_ns for time_ns in found if time_ns is not None]
        if self._alarms:
            times.append(self._alarms[0][0])
        return min(times, default=None)

    def _settle(self) -> None:
        """Begin every step that is due now; what it brings may be another worker's business."""
        happened = True
        while happened:
            happened = False
            for worker_id in list(self._taking_part):
                self._engines[worker_id].next_event_ns()
                happened |= self._advance(worker_id, self.now_ns)

    def _catch_up(self, worker_id: str) -> VirtualEngine:
        self._advance(worker_id, self.now_ns)
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
                case RequestDone(key=key) if self._is_prefill(worker_id, key):
                    self._leave(worker_id, key)
            self._tell(worker_id, event)
        return bool(events)

    def _is_prefill(self, worker_id: str, key: int) -> bool:
        handover = self._handovers.get(key)
        return handover is not None and handover.prefill_id == worker_id

    def _leave(self, worker_id: str, key: int) -> None:
        """The worker's leg concerns nobody else any more."""
        self._taking_part[worker_id] -= 1
        if not self._taking_part[worker_id]:
            del self._taking_part[worker_id]
        handover = self._handovers[key]
        handover.legs -= 1
        if not handover.legs:
            del self._handovers[key]
