"""One agent on its host: a child process, guarded, and started again when it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

from commutator.backoff import Backoff
from commutator.contract.launcher import AgentPlan, AgentState, LauncherContext, LaunchPlan
from commutator.launcher.child import take_start_failure
from commutator.launcher.process import LocalLauncher

log = logging.getLogger(__name__)
_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)
_END_S = 10.0
"""What an agent may take to end without a drain, before it is killed."""


class HostedAgent:
    """Runs one agent on this host for a launcher of agents. Used from one event loop.

    If this process ends in any way, its guard ends the agent and the agent's children.
    """

    def __init__(
        self,
        plan: AgentPlan,
        *,
        address: str,
        control: str,
        on_line: Callable[[str, str, str], None],
        backoff: Backoff = _BACKOFF,
    ) -> None:
        """``address`` and ``control``: as in ``AgentPlan``; ``on_line`` as in ``LauncherContext``.

        ``backoff``: the waits between starts.
        """
        self.state = AgentState.RUNNING
        """Any but WAITING."""
        self.cause: str | None = None
        """How the process ended last; None: it never did."""
        self._plan = plan
        self._arguments = (address, control)
        self._on_line = on_line
        self._backoff = backoff
        self._stopping = asyncio.Event()
        self._grace_s = plan.grace_s

    def stop(self, grace_s: float) -> None:
        """Have ``run`` end the agent, which may take ``grace_s``, and return."""
        self._grace_s = grace_s
        if self.state is AgentState.RUNNING:
            self.state = AgentState.ENDING
        self._stopping.set()

    async def run(self) -> None:
        """Keep the agent running until ``stop`` is called, or until it can never start."""
        folder = Path(tempfile.mkdtemp(prefix="commutator-agent-"))
        # Ray and others set it to the cores of a task, which an engine's threads would obey.
        env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        launcher = LocalLauncher(LauncherContext(folder=folder, env=env, on_line=self._on_line))
        await launcher.open()
        try:
            while not self._stopping.is_set():
                wait_s = await self._live_once(launcher, folder)
                if wait_s is None:
                    return
                with suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._stopping.wait()
        finally:
            await launcher.close()

    async def _live_once(self, launcher: LocalLauncher, folder: Path) -> float | None:
        """Start the agent and wait for its end; returns the wait before the next start, if any."""
        started_s = time.monotonic()
        self.cause = await self._live(launcher, folder)
        if self._has_failed(folder):
            return None
        self._backoff, wait_s = self._backoff.after_failure(time.monotonic() - started_s)
        if not self._stopping.is_set():
            log.warning(
                "agent %s %s; starting it again in %.1f s", self._plan.name, self.cause, wait_s
            )
        return wait_s

    async def _live(
        self,
        launcher: LocalLauncher,
        folder: Path,
        over: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> str:
        """Run the agent until it ends, ``stop`` is called, or ``over`` returns; says how it ended.

        After ``over`` it ends without a drain.
        """
        plan = self._plan
        for name, text in plan.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        argv = (sys.executable, "-m", plan.module, str(folder), *self._arguments)
        process = await launcher.start(plan.name, LaunchPlan(argv=argv, address=""))
        ended = asyncio.create_task(process.wait())
        stopping = asyncio.create_task(self._stopping.wait())
        ending = set() if over is None else {asyncio.create_task(over())}
        try:
            await asyncio.wait({ended, stopping, *ending}, return_when=asyncio.FIRST_COMPLETED)
            if not (ended.done() or stopping.done()):
                process.interrupt()
                await asyncio.wait({ended}, timeout=_END_S)
        finally:
            for task in (stopping, *ending):
                task.cancel()
            await process.stop(self._grace_s if stopping.done() else 0.0)
        return await ended

    def _has_failed(self, folder: Path) -> bool:
        """Whether the agent that has ended can never start. Takes over the reason that it gave."""
        failure = take_start_failure(folder)
        if failure is None:
            return False
        self.cause = "; ".join(failure.problems)
        if failure.is_permanent:
            self.state = AgentState.FAILED
        return failure.is_permanent
