"""Serves one ledger to the front doors of a deployment, on the registry's port.

door -> ledger                                             ledger -> door
["limits", "open", door, incarnation,                      ["limits", "opened", day, [Account, ...]]
 [[ticket, requests left, principal], ...]]
["limits", "admit", ticket, principal, Limits, tokens,     ["limits", ticket, Standing, limit | nil,
 requests, tokens]                                          seconds to retry | nil,
                                                            requests, tokens]
["limits", "report",                                       ["limits", "allowed",
 [[principal, requests, tokens, Settlement], ...],          [[number, Standing, requests, tokens],
 [Settlement, ...],                                          ...]]
 [[number, principal, Limits, requests, tokens], ...]]
                                                           ["limits", "recall", principal]
["limits", "returned", principal]
["limits", "changes", day, [Account, ...]]

A door opens first on each connection. Several doors ask for a request (``admit``), and in the same
breath for an allowance, of so many further requests and tokens. They report some time later what
they used of it, the requests of one principal together, and which requests ended, and ask for more.
A ticket stands for those that have not ended. They return what they do not use. Before a principal
is refused, the allowances of all doors are recalled. One door alone decides by itself, and copies
here what changed in its accounts (``changes``), so that a door that takes its place begins where it
ended.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, get_args

import msgspec
from attrs import define, fields

from commutator.contract.limiter import Standing
from commutator.contract.principal import Limits
from commutator.contract.service import Connection, Receiver, Service
from commutator_limits.ledger import (
    Account,
    Ledger,
    LimitName,
    Moment,
    Natural,
    Refusal,
    Settlement,
    Use,
)

SERVICE = "limits"
"""The first word of each frame."""

_RECALL_TIMEOUT_S = 0.25
"""A door that does not answer keeps what it was given; until it does, others may be refused."""
_MAX_ALLOWED = 4096
"""Requests, by one answer."""

COUNTED: tuple[LimitName, ...] = get_args(LimitName)
"""The limits that the ledger needs, in the order of a frame."""
_Packed = tuple[int | None, int | None, int | None, int | None]
_Facts = tuple[int | None, int | None, float | None, int | None, int | None, float | None]
_Answer = tuple[_Facts, LimitName | None, float | None]
_Allowed = list[tuple[int, _Facts, Natural, Natural]]
_Asked = list[tuple[int, str, _Packed, Natural, Natural]]
_Report = tuple[list[Use], list[Settlement], _Asked]
_Left = list[tuple[int, Natural, str]]

pack_limits: Callable[[Limits], _Packed] = attrgetter(*COUNTED)
"""What the ledger needs of a principal's limits."""
_facts: Callable[[Standing], _Facts] = attrgetter(*(one.name for one in fields(Standing)))


def now() -> Moment:
    """Of the clocks of this machine, which all its processes share."""
    return Moment(time.monotonic(), time.time())


def _unpack_limits(packed: Sequence[int | None]) -> Limits:
    return Limits(**dict(zip(COUNTED, packed, strict=True)))


def unpack_accounts(packed: list[Any]) -> list[Account]:
    """Accounts out of a frame. Raises ValueError for anything else."""
    return msgspec.convert(packed, list[Account])


def unpack_allowed(packed: list[Any]) -> list[tuple[int, Standing, int, int]]:
    """(number, standing, requests, tokens) of each answer. Raises ValueError for anything else."""
    return [
        (number, Standing(*facts), requests, tokens)
        for number, facts, requests, tokens in msgspec.convert(packed, _Allowed)
    ]


def unpack_answer(standing: Any, limit: Any, retry_after_s: Any) -> Standing | Refusal:
    """What ``Ledger.admit`` returned at the other end. Raises ValueError for anything else."""
    facts, limit, retry_after_s = msgspec.convert((standing, limit, retry_after_s), _Answer)
    stands = Standing(*facts)
    return stands if limit is None else Refusal(limit, retry_after_s, stands)


@define(eq=False)
class _Question:
    """A request that would be refused, unless what doors were allowed makes room for it."""

    decide: Callable[[], None]
    waits_for: set[_Connection]
    timer: asyncio.TimerHandle | None = None


class LedgerService(Service):
    """The ledger of a deployment, in the supervisor's process, which outlives every front door."""

    name = SERVICE

    def __init__(self, clock: Callable[[], Moment] = now) -> None:
        self.ledger = Ledger()
        self.clock = clock
        self.latest: dict[str, _Connection] = {}
        """Each door's latest connection; what still comes on an earlier one is out of date."""
        self._questions: dict[str, list[_Question]] = {}
        """By principal, those that wait for what was recalled."""

    def connected(self, connection: Connection) -> Receiver:
        return _Connection(self, connection)

    def recall(self, principal: str, decide: Callable[[], None]) -> bool:
        """Have all doors return what they are allowed, then ``decide``.

        Returns False, and does nothing, if there is nothing to be returned.
        """
        holders = {one for one in self.latest.values() if principal in one.allowed}
        if not holders:
            return False
        question = _Question(decide, holders)
        self._questions.setdefault(principal, []).append(question)
        for one in holders:
            one.send([SERVICE, "recall", principal])
        loop = asyncio.get_running_loop()
        question.timer = loop.call_later(_RECALL_TIMEOUT_S, self._decide, principal, question)
        return True

    def is_recalling(self, principal: str) -> bool:
        """Whether a request waits for what was recalled: then no door is allowed anything."""
        return principal in self._questions

    def returned(self, principal: str, connection: _Connection) -> None:
        """A door returned what it had of ``principal``."""
        connection.allowed.discard(principal)
        for question in [*self._questions.get(principal, ())]:
            question.waits_for.discard(connection)
            if not question.waits_for:
                self._decide(principal, question)

    def replaced(self, connection: _Connection) -> None:
        """A door has a new connection: on the former one nothing is returned any more."""
        for principal in [*connection.allowed]:
            self.returned(principal, connection)

    def _decide(self, principal: str, question: _Question) -> None:
        if question.timer is not None:
            question.timer.cancel()
        for one in question.waits_for:  # gone, or hung: what it has stays charged
            one.allowed.discard(principal)
        waiting = self._questions[principal]
        waiting.remove(question)
        if not waiting:
            del self._questions[principal]
        question.decide()


class _Connection(Receiver):
    """One of a door. When it ends, the door's requests may be settled on its next one."""

    def __init__(self, service: LedgerService, connection: Connection) -> None:
        self.allowed: set[str] = set()
        """Principals for whom the door may have something to return."""
        self.send = connection.send
        self._service = service
        self._ledger = service.ledger
        self._clock = service.clock
        self._door: str | None = None

    def on_frame(self, frame: list[Any]) -> None:
        ledger, door = self._ledger, self._door
        if door is not None and self._service.latest[door] is not self:
            return
        match frame:
            case [
                _, "admit", int(ticket), str(principal), list(packed), int(tokens),
                int(more), int(more_tokens),
            ] if door:  # fmt: skip
                limits = _unpack_limits(packed)
                self._admit(door, ticket, principal, limits, tokens, more, more_tokens)
            case [_, "report", list(used), list(ended), list(asked)] if door:
                self._reported(door, *msgspec.convert((used, ended, asked), _Report))
            case [_, "returned", str(principal)] if door:
                ledger.returned(door, principal)
                self._service.returned(principal, self)
            case [_, "changes", int(day), list(accounts)] if door:
                ledger.restore(day, unpack_accounts(accounts), self._clock())
            case [_, "open", str(name), str(incarnation), list(tickets)]:
                left = {
                    number: (count, principal)
                    for number, count, principal in msgspec.convert(tickets, _Left)
                }
                self._door = name
                former = self._service.latest.get(name)
                self._service.latest[name] = self
                ledger.door_opened(name, incarnation, self._clock(), left)
                if former is not None and former is not self:
                    self._service.replaced(former)
                day, accounts = ledger.accounts(self._clock())
                self.send([SERVICE, "opened", day, accounts])
            case _:
                raise ValueError("unknown frame, or a door that has not opened")

    def _admit(
        self,
        door: str,
        ticket: int,
        principal: str,
        limits: Limits,
        tokens: int,
        more: int = 0,
        more_tokens: int = 0,
        *,
        recalls: bool = True,
    ) -> None:
        """``recalls``: ask again, before a refusal, once what doors were allowed has come back."""
        ledger, at = self._ledger, self._clock()
        answer = ledger.admit(door, ticket, principal, limits, tokens, at)
        if isinstance(answer, Refusal):

            def again() -> None:
                if self._service.latest[door] is self:
                    self._admit(door, ticket, principal, limits, tokens, recalls=False)

            if not (recalls and self._service.recall(principal, again)):
                facts = _facts(answer.standing)
                self.send([SERVICE, ticket, facts, answer.limit, answer.retry_after_s, 0, 0])
            return
        if more or more_tokens:
            more, more_tokens = self._allow(door, principal, limits, more, more_tokens, at)
            answer = ledger.standing(principal, limits, at)
        self.send([SERVICE, ticket, _facts(answer), None, None, more, more_tokens])

    def _reported(
        self,
        door: str,
        used: list[Use],
        ended: list[Settlement],
        asked: _Asked,
    ) -> None:
        ledger, at = self._ledger, self._clock()
        for use in used:
            ledger.used(door, use, at)
        ledger.settle(door, ended, at)
        answers = []
        for number, principal, packed, requests, tokens in asked:
            limits = _unpack_limits(packed)
            allowed = self._allow(door, principal, limits, requests, tokens, at)
            answers.append([number, _facts(ledger.standing(principal, limits, at)), *allowed])
        if answers:
            self.send([SERVICE, "allowed", answers])

    def _allow(
        self, door: str, principal: str, limits: Limits, requests: int, tokens: int, at: Moment
    ) -> tuple[int, int]:
        if self._service.is_recalling(principal):
            return 0, 0
        requests = min(requests, _MAX_ALLOWED)
        allowed = self._ledger.allow(door, principal, limits, requests, tokens, at)
        if any(allowed):
            self.allowed.add(principal)
        return allowed
