"""The thread that owns one tier: jobs by urgency, opening with back-off, and a bounded end."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from enum import IntEnum

from commutator.errors import CommutatorError
from commutator.kv.guards import BreakerState
from commutator.kv.tier_worker import TierWorker

__all__ = ["Job", "JobUrgency", "TierThread"]

log = logging.getLogger(__name__)

_IDLE_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0


class JobUrgency(IntEnum):
    """Lower goes first; within one, first come, first served."""

    FREE = 0
    """No bytes move, and stores need the room."""
    LOAD = 1
    MAKE_ROOM = 2
    OFFLOAD = 3
    PREFETCH = 4
    VERIFY = 5


Job = Callable[[TierWorker | None], Generator[None, None, None]]
"""A piece of work that yields between its parts, so that a more urgent one can go in between.

It is given None when the tier is not open: then it reports failure, at once.
"""


class TierThread:
    """``on_up`` and ``on_down`` are called on this thread when the tier becomes usable or not."""

    def __init__(
        self, worker: TierWorker, *, on_up: Callable[[], None], on_down: Callable[[str], None]
    ) -> None:
        self.worker = worker
        self._on_up = on_up
        self._on_down = on_down
        self._jobs: list[tuple[JobUrgency, int, Generator[None, None, None] | Job]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._next_try_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.tried = threading.Event()
        """Set once the tier was opened, or could not be for the first time."""
        self.usable = False
        """Whether jobs are worth giving to it."""
        self._thread = threading.Thread(
            target=self._run, name=f"tier-{worker.setup.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def submit(self, urgency: JobUrgency, job: Job) -> None:
        """From any thread. After ``stop`` the job is told that the tier is not open."""
        with self._changed:
            if not self._stopping:
                heapq.heappush(self._jobs, (urgency, next(self._order), job))
                self._changed.notify()
                return
        for _ in job(None):
            pass

    def stop(self) -> None:
        """Begin to end: finish the part that runs, fail what waits, and close the tier."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the end that ``stop`` began."""
        if self._thread.ident is None:
            return  # it was never started
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tier %s did not stop within %.1f s", self.worker.setup.name, timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._open_when_due()
                self._see_state()
                self.tried.set()
                self._run_part()
                self.worker.reap()
            except Exception:  # whoever waits for this tier must not wait for ever
                log.exception("the thread of tier %s goes on after", self.worker.setup.name)
                time.sleep(_IDLE_S)
        self._fail_all()
        self.worker.close()

    def _open_when_due(self) -> None:
        if self.worker.is_open or time.monotonic() < self._next_try_s:
            return
        name = self.worker.setup.name
        try:
            self.worker.open()
        except (CommutatorError, OSError) as error:
            log.warning("tier %s cannot be used, and is tried again later: %s", name, error)
        except Exception:
            log.exception("tier %s failed to open, and is tried again later", name)
        else:
            self._pause_s = _FIRST_PAUSE_S
            return
        self._next_try_s = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _see_state(self) -> None:
        """Tell when the tier becomes usable or unusable; a trial counts as usable."""
        usable = self.worker.is_open and (
            self.worker.setup.breaker.state(time.monotonic()) is not BreakerState.OPEN
        )
        if usable != self.usable:
            self.usable = usable
            if usable:
                self._on_up()
            else:
                self._on_down("it failed too often")

    def _run_part(self) -> None:
        with self._changed:
            if not self._jobs:
                self._changed.wait(_IDLE_S)
                return
            urgency, order, job = heapq.heappop(self._jobs)
        parts = job(self.worker if self.worker.is_open else None) if callable(job) else job
        try:
            next(parts)
        except StopIteration:
            return
        except Exception:
            log.exception("a job of tier %s failed", self.worker.setup.name)
            return
        with self._changed:
            heapq.heappush(self._jobs, (urgency, order, parts))

    def _fail_all(self) -> None:
        with self._changed:
            jobs, self._jobs = self._jobs, []
        for _, _, job in sorted(jobs, key=lambda job: job[:2]):
            try:
                if callable(job):
                    for _ in job(None):
                        pass
                else:
                    job.close()
            except Exception:
                log.exception("a job of tier %s failed", self.worker.setup.name)
