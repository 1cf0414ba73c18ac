"""Supervises one front-door process: starts it, checks that it answers, restarts it."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from commutator.backoff import Backoff
from commutator.config.model import RuntimeConfig
from commutator.contract.launcher import Launcher, LaunchPlan
from commutator.errors import CommutatorError
from commutator.supervisor.restart import Ended, ProcessEndedError, keep_running, while_alive

log = logging.getLogger(__name__)
_POLL_S = 0.1

_EXIT_S = 5.0
"""Seconds that a front door may take to exit after its last request."""


@frozen
class Patience:
    """Time limits, in seconds, after which a front door is restarted."""

    start_s: float = 120.0
    """From its start to its first answer."""
    answer_s: float = 10.0
    """For one health check."""
    between_s: float = 5.0
    """From one answer to the next health check."""
    misses: int = 3
    """Health checks in a row without an answer."""
    stop_s: float = 5.0
    """For the exit of one that did not answer; its requests are lost."""


class FrontendAgent:
    """Runs one front door. All front doors listen on the same port."""

    def __init__(
        self,
        name: str,
        runtime: RuntimeConfig,
        launcher: Launcher,
        env: Mapping[str, str],
        config_file: Path,
        patience: Patience = Patience(),
    ) -> None:
        self.name = name
        self.ready = asyncio.Event()
        """Set while the process runs and can serve every model."""
        self._launcher = launcher
        # All front doors share one port; a socket per process identifies which one answers.
        self._socket = config_file.parent / f"{name}.sock"
        argv = (sys.executable, "-m", "commutator.frontend.process")
        self._grace_s = runtime.drain_timeout_s + _EXIT_S
        self._plan = LaunchPlan(
            argv=(*argv, str(config_file), str(self._socket)),
            address=str(self._socket),
            env=env,
            drain_s=self._grace_s,
        )
        self._patience = patience
        self._backoff = Backoff(runtime.restart_backoff_s, runtime.restart_backoff_max_s)

    async def run(self) -> None:
        """Keep the front door running until cancelled; then let it drain and stop it."""
        await keep_running(self.name, self._live_once, self._backoff)

    async def leave(self) -> bool:
        """Have the front door be not ready from now on; returns whether a client will notice."""
        return await self._ask("/leave", "POST") == "200"

    async def _live_once(self) -> Ended:
        alive_s: float | None = None
        grace_s = self._grace_s
        try:
            process = await self._launcher.start(self.name, self._plan)
        except OSError as error:
            return Ended(f"cannot be started: {error}", 0.0)
        try:
            await while_alive(process, self._wait_until_it_answers())
            alive_s = time.monotonic()
            await while_alive(process, self._poll("/ready"))
            self.ready.set()
            hangs = process.end_when_it_hangs(lambda: self._ask("/live"))
            await while_alive(process, self._watch(), hangs)
            reason, grace_s = self._given_up("gave no answer for too long")
        except ProcessEndedError as error:
            reason = str(error)
        except CommutatorError as error:
            reason, grace_s = self._given_up(str(error))
        finally:
            self.ready.clear()
            healthy_s = 0.0 if alive_s is None else time.monotonic() - alive_s
            await process.stop(grace_s)
        return Ended(reason, healthy_s)

    def _given_up(self, reason: str) -> tuple[str, float]:
        """Say why before it is stopped, as that may take seconds. Returns its grace, too."""
        log.warning("%s %s; stopping it", self.name, reason)
        return reason, self._patience.stop_s

    async def _wait_until_it_answers(self) -> None:
        """Raises CommutatorError when there was no answer in time."""
        try:
            async with asyncio.timeout(self._patience.start_s):
                await self._poll("/live")
        except TimeoutError:
            raise CommutatorError(
                f"gave no answer within {self._patience.start_s:g} s of its start"
            ) from None

    async def _watch(self) -> None:
        """Return when too many health checks in a row had no answer."""
        missed = 0
        while missed < self._patience.misses:
            await asyncio.sleep(self._patience.between_s)
            missed = 0 if await self._ask("/live") is not None else missed + 1
            if missed:
                log.warning("%s does not answer", self.name)

    async def _poll(self, path: str) -> None:
        while await self._ask(path) != "200":  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(_POLL_S)

    async def _ask(self, path: str, method: str = "GET") -> str | None:
        """The status code of a request, or None without an answer."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return None
        try:
            writer.write(f"{method} {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            async with asyncio.timeout(self._patience.answer_s):
                status = (await reader.readline()).split()
        except OSError:  # TimeoutError is one, too
            return None
        finally:
            writer.close()
        return status[1].decode() if len(status) > 1 else None
