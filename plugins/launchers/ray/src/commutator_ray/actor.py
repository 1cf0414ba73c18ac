"""The actor that runs one agent on a node of a Ray cluster. Imported there, and by the driver."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import ray

from commutator.launcher import AgentPlan
from commutator.launcher.hosted import HostedAgent

__all__ = ["AgentActor"]


class AgentActor:
    """Runs an agent in a thread, so that Ray's calls are answered whatever it does.

    When Ray starts the actor again, here or on another node, its constructor runs again.
    """

    def __init__(self, plan: dict[str, Any]) -> None:
        """``plan``: the fields of an ``AgentPlan``."""
        self._address = ray.util.get_node_ip_address()
        self._agent = HostedAgent(
            AgentPlan(**plan),
            address=self._address,
            control=ray.get_runtime_context().gcs_address,
            on_line=_print_line,
        )
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def status(self) -> dict[str, str | None]:
        """Its state and cause, as in ``PlacedAgent``, and the address of its node."""
        agent = self._agent
        return {"state": agent.state.value, "cause": agent.cause, "host": self._address}

    def stop(self, grace_s: float) -> None:
        """End the agent; return when it and its children have ended. Idempotent."""
        with suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._agent.stop, grace_s)
        self._ended.wait()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._agent.run())
        finally:
            self._ended.set()


def _print_line(process: str, stream: str, line: str) -> None:
    """Into the actor's own log, which `ray logs` and the dashboard show."""
    del stream
    print(f"[{process}] {line}", flush=True)  # noqa: T201
