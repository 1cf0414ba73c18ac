"""The front doors of one host: as many as are wanted, and new ones in place of old ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from commutator.errors import CommutatorError
from commutator.supervisor.frontend_agent import FrontendAgent

log = logging.getLogger(__name__)
_READY_S = 120.0
"""For a new front door to serve, before the old ones are kept instead."""


class Doors:
    """Runs front doors, which share their ports. Used from one event loop."""

    def __init__(self, make_agent: Callable[[str], FrontendAgent]) -> None:
        """``make_agent`` makes one of a name, for the configuration as it is then."""
        self._make_agent = make_agent
        self._tasks: dict[FrontendAgent, asyncio.Task[None]] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._count = 0

    def agents(self) -> list[FrontendAgent]:
        """Those that are to run now."""
        return list(self._tasks)

    def begin(self, count: int) -> None:
        """Start ``count`` of them."""
        for _ in range(count):
            self._add()

    async def run(self) -> None:
        """Run them until cancelled; then let all drain. Raises what ends one of them."""
        try:
            while True:
                changed = asyncio.create_task(self._changed.wait())
                await asyncio.wait(
                    {*self._tasks.values(), changed}, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                self._changed.clear()
                for task in self._tasks.values():
                    if task.done():
                        task.result()
        finally:
            tasks = [*self._tasks.values(), *self._leaving]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def scale(self, count: int) -> None:
        """Have ``count`` of them. Returns once new ones serve; those that leave drain meanwhile.

        Raises CommutatorError when a new one does not.
        """
        while len(self._tasks) < count:
            await self._add_ready()
        for agent in self.agents()[count:]:
            self._let_go(agent)

    async def replace(self) -> None:
        """Put a new one in place of each: it serves before the old one drains.

        Raises CommutatorError when a new one does not; then the others stay as they are.
        """
        for agent in self.agents():
            await self._add_ready()
            self._let_go(agent)

    def _add(self) -> FrontendAgent:
        agent = self._make_agent(f"frontend-{self._count}")
        self._count += 1
        self._tasks[agent] = asyncio.create_task(agent.run())
        self._changed.set()
        return agent

    async def _add_ready(self) -> None:
        agent = self._add()
        try:
            async with asyncio.timeout(_READY_S):
                await agent.ready.wait()
        except TimeoutError:
            self._let_go(agent)
            text = f"{agent.name}, a new front door, does not serve after {_READY_S:g} s"
            raise CommutatorError(f"{text}; see its lines in the log") from None

    def _let_go(self, agent: FrontendAgent) -> None:
        task = self._tasks.pop(agent)
        task.cancel()
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
        self._changed.set()
