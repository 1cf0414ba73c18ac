"""``python -m commutator_trtllm OPTIONS [SERVER...]``: a sidecar, and its server if given.

OPTIONS are ``SidecarOptions`` as JSON. The server is started as a child process. When one of the
two ends, the other is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import Any

import msgspec

from commutator_engine_kit import log_to_stderr, told_to_stop
from commutator_trtllm.sidecar import Sidecar, SidecarOptions

log = logging.getLogger(__name__)

_GRACE_S = 8.0
_KILLED = 128
"""Plus the signal's number: the exit status of a killed process, as in shells."""


async def run(options: SidecarOptions, command: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, or until the server ends; returns the exit status."""
    stop_signal = told_to_stop()
    server = await asyncio.create_subprocess_exec(*command) if command else None
    async with Sidecar(options).running():
        ends: list[asyncio.Task[Any]] = [asyncio.create_task(stop_signal.wait())]
        if server is not None:
            ends.append(asyncio.create_task(server.wait()))
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for task in ends:
        task.cancel()
    if server is None or stop_signal.is_set():
        if server is not None:
            await _end(server)
        return 0
    status = server.returncode or 0
    log.error("the server ended with status %d", status)
    return _KILLED - status if status < 0 else status or 1


async def _end(server: asyncio.subprocess.Process) -> None:
    try:
        server.terminate()
        async with asyncio.timeout(_GRACE_S):
            await server.wait()
    except ProcessLookupError:
        pass
    except TimeoutError:
        server.kill()


def main() -> None:
    log_to_stderr()
    options, command = msgspec.json.decode(sys.argv[1], type=SidecarOptions), sys.argv[2:]
    try:
        status = asyncio.run(run(options, command))
    except OSError as error:
        sys.exit(f"cannot start {command[0] if command else 'the sidecar'}: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
