"""Looks after one front-door process: starts it, asks whether it answers, starts it again."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from attrs import frozen

from commutator.config.model import RuntimeConfig
from commutator.errors import CommutatorError
from commutator.runtime.backoff import Backoff
from commutator.runtime.keep_running import Ended, ProcessEndedError, keep_running, while_alive
from commutator.runtime.process import Launcher

__all__ = ["FrontendAgent", "Patience"]

log = logging.getLogger(__name__)

_POLL_S = 0.1
_LAST_WORDS_S = 5.0
"""What a front door may take to exit once its last request is finished."""


@frozen
class Patience:
    """How long a front door may say nothing before it is started again."""

    start_s: float = 120.0
    answer_s: float = 10.0
    """For one question."""
    between_s: float = 5.0
    """From one answer to the next question."""
    misses: int = 3
    """So many questions in a row that are not answered are too many."""
    stop_s: float = 5.0
    """For one that did not answer to end by itself, as nothing can be expected of it."""


class FrontendAgent:
    """Runs one front door. All of them listen on the same port."""

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
        """Set from the first time that it can serve every model until the process ends."""
        self._launcher = launcher
        self._env = env
        self._socket = config_file.parent / f"{name}.sock"
        """Beside the shared port, where nobody knows which front door answers."""
        self._argv = (
            *(sys.executable, "-m", "commutator.runtime.frontend_process"),
            *(str(config_file), str(self._socket)),
        )
        self._grace_s = runtime.drain_timeout_s + _LAST_WORDS_S
        self._patience = patience
        self._backoff = Backoff(runtime.restart_backoff_s, runtime.restart_backoff_max_s)

    async def run(self) -> None:
        """Until cancelled; then the front door drains and stops."""
        await keep_running(self.name, self._live_once, self._backoff)

    async def _live_once(self) -> Ended:
        alive_s: float | None = None
        grace_s = self._grace_s
        try:
            process = await self._launcher.start(self.name, self._argv, self._env)
        except OSError as error:
            return Ended(f"cannot be started: {error}", 0.0)
        try:
            await while_alive(process, self._wait_until_it_answers())
            alive_s = time.monotonic()
            await while_alive(process, self._poll("/ready"))
            self.ready.set()
            await while_alive(process, self._watch())
            reason, grace_s = "gave no answer for too long", self._patience.stop_s
        except ProcessEndedError as error:
            reason = str(error)
        except CommutatorError as error:
            reason = f"failed: {error}"
        finally:
            self.ready.clear()
            healthy_s = 0.0 if alive_s is None else time.monotonic() - alive_s
            await self._launcher.stop(process, grace_s)
        return Ended(reason, healthy_s)

    async def _wait_until_it_answers(self) -> None:
        try:
            async with asyncio.timeout(self._patience.start_s):
                await self._poll("/live")
        except TimeoutError:
            raise CommutatorError(f"no answer within {self._patience.start_s:g} s") from None

    async def _watch(self) -> None:
        """Returns when it has left too many questions in a row unanswered."""
        missed = 0
        while missed < self._patience.misses:
            await asyncio.sleep(self._patience.between_s)
            missed = 0 if await self._ask("/live") is not None else missed + 1
            if missed:
                log.warning("%s does not answer", self.name)

    async def _poll(self, path: str) -> None:
        while await self._ask(path) != "200":  # noqa: ASYNC110 - another process decides
            await asyncio.sleep(_POLL_S)

    async def _ask(self, path: str) -> str | None:
        """The status code of a GET, or None without an answer."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._socket)
        except OSError:
            return None
        try:
            writer.write(f"GET {path} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode())
            async with asyncio.timeout(self._patience.answer_s):
                words = (await reader.readline()).split()
        except OSError:  # TimeoutError is one, too
            return None
        finally:
            writer.close()
        return words[1].decode() if len(words) > 1 else None
