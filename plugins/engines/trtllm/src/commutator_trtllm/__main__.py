"""``python -m commutator_trtllm --url URL ... [-- SERVER...]``: a sidecar, and its server if given.

The server is started as a child process. When one of the two ends, the other is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from commutator_trtllm.sidecar import Sidecar, SidecarOptions

log = logging.getLogger(__name__)

_GRACE_S = 8.0
_KILLED = 128
"""Plus the signal's number: the exit status of a killed process, as in shells."""


def sidecar_arguments(options: SidecarOptions) -> tuple[str, ...]:
    """The command line that ``main`` reads."""
    arguments = ["--url", options.url, "--host", options.host, "--port", str(options.port)]
    arguments += ["--max-model-len", str(options.max_model_len)]
    arguments += [] if options.kv_events else ["--no-kv-events"]
    arguments += ["--hands-over"] if options.hands_over else []
    return tuple(arguments)


def parse(arguments: Sequence[str]) -> tuple[SidecarOptions, tuple[str, ...]]:
    """The options in a command line of ``sidecar_arguments``, and the server's after ``--``."""
    own, server = list(arguments), list[str]()
    if "--" in own:
        place = own.index("--")
        own, server = own[:place], own[place + 1 :]
    parser = argparse.ArgumentParser(prog="python -m commutator_trtllm")
    parser.add_argument("--url", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--no-kv-events", dest="kv_events", action="store_false")
    parser.add_argument("--hands-over", action="store_true")
    return SidecarOptions(**vars(parser.parse_args(own))), tuple(server)


async def run(options: SidecarOptions, command: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT, or until the server ends; returns the exit status."""
    stop_signal = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop_signal.set)
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
    level = os.environ.get("COMMUTATOR_LOG_LEVEL", "INFO")
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
    options, command = parse(sys.argv[1:])
    try:
        status = asyncio.run(run(options, command))
    except OSError as error:
        sys.exit(f"cannot start {command[0] if command else 'the sidecar'}: {error}")
    sys.exit(status)


if __name__ == "__main__":
    main()
