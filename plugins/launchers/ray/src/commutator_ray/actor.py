"""The actor that runs one agent on a node of a Ray cluster. Imported there, and by the driver."""

from __future__ import annotations

import asyncio
import secrets
import threading
import time
from collections.abc import Awaitable
from contextlib import suppress
from typing import Any

import ray

from commutator.contract.launcher import AgentPlan
from commutator_ray.epochs import Beat, Epoch, Epochs, Member
from commutator_ray.hosted import HostedAgent
from commutator_ray.hosted_rank import HostedRank

_ANSWER_S = 2.0
"""Longest wait for the actor of rank 0."""


class AgentActor:
    """Runs an agent in a thread, so that Ray's calls are answered whatever it does.

    When Ray starts the actor again, here or on another node, its constructor runs again. Of a
    worker over several nodes there is one for each rank; that of rank 0 keeps their epochs.
    """

    def __init__(self, plan: dict[str, Any], rank: int, first: str) -> None:
        """``plan``: the fields of an ``AgentPlan``; ``first``: the name of rank 0's actor."""
        self._address = ray.util.get_node_ip_address()
        self._first = first
        self._first_actor: Any = None
        agent, name = AgentPlan(**plan), secrets.token_hex(4)
        self._rank = rank
        self._epochs = Epochs(agent.nodes, name)
        self._lock = threading.Lock()
        control: str = ray.get_runtime_context().gcs_address
        self._agent: HostedAgent
        if agent.nodes == 1:
            self._agent = HostedAgent(
                agent, address=self._address, control=control, on_line=_print_line
            )
        else:
            self._agent = HostedRank(
                agent,
                Member(rank, name),
                self._ask,
                address=self._address,
                control=control,
                on_line=_print_line,
            )
        self._ended = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name="agent", daemon=True).start()

    def status(self) -> dict[str, str | None]:
        """Its state and cause, as in ``PlacedAgent``, and the address of its node."""
        agent = self._agent
        return {"state": agent.state.value, "cause": agent.cause, "host": self._address}

    def hear(self, beat: Beat) -> Epoch | None:
        """As ``Epochs.hear``; asked of rank 0 only."""
        with self._lock:
            return self._epochs.hear(beat, time.monotonic())

    def stop(self, grace_s: float) -> None:
        """End the agent; return when it and its children have ended. Idempotent."""
        with suppress(RuntimeError):  # the loop is closed: it has ended
            self._loop.call_soon_threadsafe(self._agent.stop, grace_s)
        self._ended.wait()

    def _ask(self, beat: Beat) -> Awaitable[Epoch | None]:
        """Have rank 0 hear ``beat``. What is returned raises ConnectionError."""
        # Not `async def`: with one, Ray would run all calls in one thread, where `stop` waits.
        return asyncio.to_thread(self._ask_0, beat)

    def _ask_0(self, beat: Beat) -> Epoch | None:
        if self._rank == 0:
            return self.hear(beat)
        try:
            if self._first_actor is None:
                self._first_actor = ray.get_actor(self._first)
            answer: Epoch | None = ray.get(self._first_actor.hear.remote(beat), timeout=_ANSWER_S)
        except (ray.exceptions.RayError, ValueError) as error:
            self._first_actor = None
            raise ConnectionError(str(error)) from error
        return answer

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
