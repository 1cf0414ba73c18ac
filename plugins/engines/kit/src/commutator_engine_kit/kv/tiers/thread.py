"""The thread of one tier: runs jobs by urgency, opens the tier with back-off, and closes it."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Generator
from functools import partial

from commutator.errors import CommutatorError
from commutator_engine_kit.kv.block_manager.actions import JobUrgency
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.guards import BreakerState

__all__ = ["Job", "TierThread"]

log = logging.getLogger(__name__)

_IDLE_S = 0.05
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0

Job = Callable[[TierExecutor | None], Generator[None, None, None]]
"""A generator of parts; a more urgent job may run between two of them.

Its argument is None while the tier is not open: then the job reports failure at once.
"""

_Job = Job | Generator[None, None, None]
"""A job, or the rest of a started one."""


class TierThread:
    """Runs one tier's jobs.

    Calls ``on_up`` and ``on_down`` on this thread when the tier becomes usable or unusable.
    """

    def __init__(
        self, worker: TierExecutor, *, on_up: Callable[[], None], on_down: Callable[[str], None]
    ) -> None:
        self.worker = worker
        self._on_up = on_up
        self._on_down = on_down
        self._jobs: list[tuple[JobUrgency, int, _Job]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._stopping = False
        self._next_try_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self.tried = threading.Event()
        """Set after the first attempt to open the tier."""
        self.usable = False
        """Whether the tier is open and its breaker admits jobs."""
        self._thread = threading.Thread(
            target=self._run, name=f"tier-{worker.setup.name}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def submit(self, urgency: JobUrgency, job: Job) -> None:
        """Queue a job, from any thread. After ``stop`` it runs at once, as on a closed tier."""
        with self._changed:
            if not self._stopping:
                heapq.heappush(self._jobs, (urgency, next(self._order), job))
                self._changed.notify()
                return
        _fail(job)

    def stop(self) -> None:
        """Begin to stop: finish the running part, fail the queued jobs, and close the tier."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end after ``stop``."""
        if self._thread.ident is None:
            return  # never started
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.warning("tier %s did not stop within %.1f s", self.worker.setup.name, timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            self._guarded(self._turn)
        for job in self._take_jobs():
            self._guarded(partial(_fail, job))
        self.worker.close()

    def _guarded(self, call: Callable[[], None]) -> None:
        """Log an exception of a job, so that the queued jobs still run."""
        try:
            call()
        except Exception:
            log.exception("tier %s: a job failed", self.worker.setup.name)

    def _turn(self) -> None:
        self._open_when_due()
        self._see_state()
        self.tried.set()
        self._run_part()
        self.worker.reap()

    def _open_when_due(self) -> None:
        if self.worker.is_open or time.monotonic() < self._next_try_s:
            return
        name, pause_s = self.worker.setup.name, self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            self.worker.open()
        except (CommutatorError, OSError) as error:
            log.warning("tier %s cannot be opened; next try in %.1f s: %s", name, pause_s, error)
        else:
            self._pause_s = _FIRST_PAUSE_S
        finally:
            self._next_try_s = time.monotonic() + pause_s

    def _see_state(self) -> None:
        """Call ``on_up`` or ``on_down`` on a change. A half-open breaker counts as usable."""
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
        with self._changed:
            heapq.heappush(self._jobs, (urgency, order, parts))

    def _take_jobs(self) -> list[_Job]:
        with self._changed:
            jobs, self._jobs = self._jobs, []
        return [job for _, _, job in sorted(jobs, key=lambda job: job[:2])]


def _fail(job: _Job) -> None:
    if callable(job):
        for _ in job(None):
            pass
    else:
        job.close()
