"""The process of a pod that hosts an agent.

``python -m commutator_kubernetes.hosting FOLDER FILE``

FOLDER has the plan; FILE gets the reason why it ended, which Kubernetes shows. It ends with status
0 only when no further start can succeed; after anything else the kubelet starts it again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from commutator.contract.launcher import AgentPlan, LauncherContext, LaunchPlan
from commutator.launcher.child import take_start_failure, told_to_stop
from commutator.launcher.process import LocalLauncher
from commutator_kubernetes.pods import PLAN, plan_of

_CONTROL = "127.0.0.1:1"
"""A pod is never cut off: another one gets its worker's name only from the registry, and an API
server that is away for a while is no reason to stop. A loopback address answers, if by a refusal.
"""
_STOPPED = 143
_LONGEST_REASON = 4000
"""Bytes; Kubernetes keeps 4,096."""


async def host(plan: AgentPlan, address: str) -> tuple[int, str]:
    """Run the agent until it ends, or until SIGTERM; returns the status to end with, and why."""
    stopping = asyncio.create_task(told_to_stop().wait())
    folder = Path(tempfile.mkdtemp(prefix="commutator-agent-"))
    # It would be that of one container's CPUs, which an engine's threads would obey.
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    launcher = LocalLauncher(LauncherContext(folder=folder, env=env, on_line=_print_line))
    await launcher.open()
    try:
        for name, text in plan.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        argv = (sys.executable, "-m", plan.module, str(folder), address, _CONTROL)
        process = await launcher.start(plan.name, LaunchPlan(argv=argv, address=""))
        ended = asyncio.create_task(process.wait())
        await asyncio.wait({ended, stopping}, return_when=asyncio.FIRST_COMPLETED)
        await process.stop(plan.grace_s if stopping.done() else 0.0)
        cause = await ended
        failure = take_start_failure(folder)
    finally:
        stopping.cancel()
        await launcher.close()
    if failure is not None:
        cause = "; ".join(failure.problems)
        if failure.is_permanent:
            return 0, cause
    return (_STOPPED if stopping.done() and not stopping.cancelled() else 1), cause


def _print_line(process: str, stream: str, line: str) -> None:
    """Into the container's log."""
    del process, stream
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    folder, message = Path(sys.argv[1]), Path(sys.argv[2])
    plan = plan_of(
        {
            "metadata": {"name": str(folder)},
            "data": {PLAN: (folder / PLAN).read_text(encoding="utf-8")},
        }
    )
    status, cause = asyncio.run(host(plan, os.environ["POD_IP"]))
    with suppress(OSError):
        message.write_text(cause.encode()[:_LONGEST_REASON].decode(errors="ignore"))
    sys.exit(status)


if __name__ == "__main__":
    main()
