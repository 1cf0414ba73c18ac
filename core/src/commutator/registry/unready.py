"""The workers of a deployment that are not in its registry: those that start, fail or have died."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

from attrs import evolve, frozen

from commutator.contract.worker import Role


class UnreadyState(StrEnum):
    """Why a worker is not in the registry."""

    STARTING = "starting"
    """It was launched, and nothing has gone wrong yet."""
    FAILING = "failing"
    """It ended before it was ready; it is started again, unless a plan launched it."""
    DEAD = "dead"
    """It was ready, and ended or stopped answering; it is started again."""


@frozen(kw_only=True)
class UnreadyWorker:
    """A worker that gets no requests, as its supervisor knows it."""

    worker_id: str
    model: str
    kind: str
    """Of its engine."""
    engine: str
    """The name of its `engines` entry."""
    role: Role = Role.BOTH
    host: str = ""
    """The name of the host that runs it; empty without one."""
    state: UnreadyState = UnreadyState.STARTING
    since_unix_s: float
    """Since when it is in this state."""
    cause: str | None = None
    """What went wrong last, for people; None: nothing."""
    failures: int = 0
    """Starts in a row after which it was not ready, or not for long."""
    next_start_unix_s: float | None = None
    """When it is started again; None: it is being started, or never will be."""

    @property
    def problem(self) -> str | None:
        """One line for people; None while nothing is wrong."""
        if self.state is UnreadyState.STARTING:
            return None
        return f"worker {self.worker_id} is {self.state.value}: {self.cause or 'unknown cause'}"


@frozen(kw_only=True)
class RunState:
    """What only the supervisor's process knows of a run."""

    refused: dict[str, int]
    """Connections that it refused, by service."""
    unready: list[UnreadyWorker]
    """The workers that it starts, or cannot start."""


class StartLog:
    """What becomes of one worker's starts. Used by its agent, from one event loop."""

    def __init__(self, worker: UnreadyWorker, now_unix_s: Callable[[], float] = time.time) -> None:
        """``worker`` as it begins: starting."""
        self._now_unix_s = now_unix_s
        self._state = worker
        self._ready = False
        self._served = False
        """Since it was started last."""

    @property
    def current(self) -> UnreadyWorker | None:
        """None while the worker is ready."""
        return None if self._ready else self._state

    def begins(self) -> None:
        """It is started, or started again."""
        self._served = False
        self._state = evolve(self._state, next_start_unix_s=None)

    def waits(self, cause: str) -> None:
        """It is not ready yet, for a reason that is known."""
        self._state = evolve(self._state, cause=cause)

    def ready(self) -> None:
        """It is in the registry."""
        self._ready = self._served = True

    def silent(self, cause: str) -> None:
        """It was ready and is lost: its process has ended, or runs and does not answer."""
        self._change(UnreadyState.DEAD, cause)

    def ended(self, cause: str, wait_s: float) -> None:
        """It ended, and is started again in ``wait_s``."""
        failures = 0 if self._served else self._state.failures + 1
        self._change(UnreadyState.DEAD if self._served else UnreadyState.FAILING, cause)
        self._state = evolve(
            self._state, failures=failures, next_start_unix_s=self._now_unix_s() + wait_s
        )

    def _change(self, state: UnreadyState, cause: str) -> None:
        same = not self._ready and self._state.state is state
        since = self._state.since_unix_s if same else self._now_unix_s()
        self._state = evolve(
            self._state, state=state, cause=cause, since_unix_s=since, next_start_unix_s=None
        )
        self._ready = False
