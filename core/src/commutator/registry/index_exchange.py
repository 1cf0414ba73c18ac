"""Passes the prefix index of a front door on to one that starts on another host, at the hub.

door -> hub                        hub -> door
["index", "offer"]                 ["index", "next", number]    the next part for a beginner
["index", "part", number, frame]

beginner -> hub                    hub -> beginner
["index", "ask"]
["index", "next"]                  ["index", "part", frame]
                                   ["index", "lost"]            the door went away: ask again
                                   ["index", "none"]            no (other) door offers one

A part comes only when the beginner asks for it, so that the hub holds one at most for each.
"""

from __future__ import annotations

import itertools
from typing import Any

from commutator.contract.service import Connection, Receiver, Service

SERVICE = "index"
"""The first word of each frame."""


class IndexExchange(Service):
    """The exchange at a hub: it knows who offers an index, and looks into none of them."""

    name = SERVICE

    def __init__(self) -> None:
        self.offers: dict[_Door, None] = {}
        """Those that run for the longest time first: they know most."""
        self.asking: dict[int, _Door] = {}
        """Beginners by the number of their present question."""
        self.numbers = itertools.count(1)

    def connected(self, connection: Connection) -> Receiver:
        return _Door(self, connection)


class _Door(Receiver):
    """One connection: of a front door that offers its index, or of one that asks for another's."""

    def __init__(self, exchange: IndexExchange, connection: Connection) -> None:
        self._exchange = exchange
        self.send = connection.send
        self.source: _Door | None = None
        """The door whose index this one takes."""
        self._number = 0
        self._asked: set[_Door] = set()

    def on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "offer"]:
                self._exchange.offers[self] = None
            case [_, "ask"]:
                self._ask()
            case [_, "next"]:
                if self.source is not None:
                    self.source.send([SERVICE, "next", self._number])
            case [_, "part", int(number), list(part)]:
                beginner = self._exchange.asking.get(number)
                if beginner is not None and beginner.source is self:
                    beginner.send([SERVICE, "part", part])
            case _:
                raise ValueError("unknown frame")

    def _ask(self) -> None:
        """Of the doors that were not asked yet, take the one that offers for the longest time."""
        self.forget()
        others = (one for one in self._exchange.offers if one is not self)
        self.source = next((one for one in others if one not in self._asked), None)
        if self.source is None:
            self.send([SERVICE, "none"])
            return
        self._asked.add(self.source)
        self._number = next(self._exchange.numbers)
        self._exchange.asking[self._number] = self
        self.source.send([SERVICE, "next", self._number])

    def forget(self) -> None:
        """Take no further part of the index that was asked for."""
        self._exchange.asking.pop(self._number, None)
        self.source = None

    def on_lost(self) -> None:
        self.forget()
        self._exchange.offers.pop(self, None)
        for beginner in list(self._exchange.asking.values()):
            if beginner.source is self:
                beginner.forget()
                beginner.send([SERVICE, "lost"])
