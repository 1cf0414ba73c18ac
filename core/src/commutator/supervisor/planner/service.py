"""What front doors tell the planner's loop, and ask it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from commutator.contract.service import Connection, Receiver, Service
from commutator.demand import DoorReport
from commutator.supervisor.planner.loop import PlannerLoop

SERVICE = "planner"
"""The first word of each frame between front doors and planner."""


class PlannerService(Service):
    """Answers front doors, on the port of the registry.

    door -> planner                              planner -> door
    ["planner", "report", DoorReport]            ["planner", "status", {...}]
    ["planner", "leave", door]
    ["planner", "ask", number, question,         ["planner", "answer", number, value]
      seconds | nil]
    """

    name = SERVICE

    def __init__(self, loop: PlannerLoop) -> None:
        self._loop = loop

    def connected(self, connection: Connection) -> Receiver:
        return _Door(self._loop, connection)

    async def run(self) -> None:
        await self._loop.run()


class _Door(Receiver):
    """One connection of a front door. One that falls silent is forgotten later."""

    def __init__(self, loop: PlannerLoop, connection: Connection) -> None:
        self._loop = loop
        self._send = connection.send
        self._answers: Mapping[str, Callable[[float | None], Any]] = {
            "status": lambda _: loop.status(),
            "explain": loop.log.explain,
            "history": lambda _: loop.log.history(),
        }

    def on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "report", packed]:
                self._loop.report(DoorReport.unpack(packed))
                self._send([SERVICE, "status", self._loop.status()])
            case [_, "leave", str(door)]:
                self._loop.leave(door)
            case [_, "ask", int(number), str(question), float() | int() | None as at] if (
                question in self._answers
            ):
                self._send([SERVICE, "answer", number, self._answers[question](at)])
            case _:
                raise ValueError("unknown frame")
