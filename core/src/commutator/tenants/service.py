"""Serves one ledger to the front doors of a deployment, on the registry's port.

door -> ledger                                             ledger -> door
["limits", "open", door, incarnation, [ticket, ...]]       ["limits", "opened", day, [Account, ...]]
["limits", "admit", ticket, principal, Limits, tokens]     ["limits", ticket, Standing, limit | nil,
                                                            seconds to retry | nil]
["limits", "settle", ticket, tokens | nil]
["limits", "changes", day, [Account, ...]]

A door opens first on each connection. Several doors ask for each request (``admit``) and report its
end (``settle``); one door alone decides by itself, and copies here what changed in its accounts
(``changes``), so that a door that takes its place begins where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from commutator.contract.principal import Limits
from commutator.tenants.ledger import Account, Ledger, LimitName, Moment, Refusal, Standing

__all__ = [
    "SERVICE",
    "LedgerService",
    "now",
    "pack_account",
    "pack_limits",
    "unpack_accounts",
    "unpack_answer",
]

SERVICE = "limits"
"""The first word of each frame."""

_Packed = tuple[int | None, int | None, int | None, int | None]


_Facts = tuple[int | None, int | None, float | None, int | None, int | None, float | None]
_Answer = tuple[_Facts, LimitName | None, float | None]


_PackedAccount = tuple[str, list[tuple[int, int]], list[tuple[int, int]], int]


def now() -> Moment:
    """Of the clocks of this machine, which all its processes share."""
    return Moment(time.monotonic(), time.time())


def pack_limits(limits: Limits) -> _Packed:
    """What the ledger needs of a principal's limits."""
    return (
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.tokens_per_day,
        limits.concurrent_requests,
    )


def _unpack_limits(packed: Sequence[int | None]) -> Limits:
    requests, tokens, day, concurrent = packed
    return Limits(
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        tokens_per_day=day,
        concurrent_requests=concurrent,
    )


def pack_account(account: Account) -> list[Any]:
    """For a frame."""
    return [account.principal, account.requests, account.tokens, account.day_tokens]


def unpack_accounts(packed: list[Any]) -> list[Account]:
    """Accounts out of a frame. Raises ValueError for what ``pack_account`` does not return."""
    return [Account(*one) for one in msgspec.convert(packed, list[_PackedAccount])]


def unpack_answer(standing: Any, limit: Any, retry_after_s: Any) -> Standing | Refusal:
    """What ``Ledger.admit`` returned at the other end. Raises ValueError for anything else."""
    facts, limit, retry_after_s = msgspec.convert((standing, limit, retry_after_s), _Answer)
    stands = Standing(*facts)
    return stands if limit is None else Refusal(limit, retry_after_s, stands)


class LedgerService:
    """The ledger of a deployment, in the supervisor's process, which outlives every front door."""

    def __init__(self, clock: Callable[[], Moment] = now) -> None:
        self.ledger = Ledger()
        self.clock = clock
        self.latest: dict[str, object] = {}
        """Each door's latest connection; what still comes on an earlier one is out of date."""

    def connected(self, send: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
        """A door connected; ``send`` answers it. Returns what takes its frames.

        That raises ValueError or TypeError for a frame that no door sends.
        """
        return _Connection(self, send).on_frame


class _Connection:
    def __init__(self, service: LedgerService, send: Callable[[list[Any]], None]) -> None:
        self._service = service
        self._ledger = service.ledger
        self._clock = service.clock
        self._send = send
        self._door: str | None = None

    def on_frame(self, frame: list[Any]) -> None:
        ledger, door = self._ledger, self._door
        if door is not None and self._service.latest[door] is not self:
            return
        match frame:
            case [_, "admit", int(ticket), str(principal), list(packed), int(tokens)] if door:
                limits = _unpack_limits(packed)
                answer = ledger.admit(door, ticket, principal, limits, tokens, self._clock())
                if isinstance(answer, Refusal):
                    facts = _facts(answer.standing)
                    self._send([SERVICE, ticket, facts, answer.limit, answer.retry_after_s])
                else:
                    self._send([SERVICE, ticket, _facts(answer), None, None])
            case [_, "settle", int(ticket), int() | None as tokens] if door:
                ledger.settle(door, ticket, tokens, self._clock())
            case [_, "changes", int(day), list(accounts)] if door:
                ledger.restore(day, unpack_accounts(accounts), self._clock())
            case [_, "open", str(name), str(incarnation), list(tickets)]:
                self._door = name
                self._service.latest[name] = self
                ledger.door_opened(name, incarnation, {int(ticket) for ticket in tickets})
                day, accounts = ledger.accounts(self._clock())
                self._send([SERVICE, "opened", day, [pack_account(one) for one in accounts]])
            case _:
                raise ValueError("unknown frame, or a door that has not opened")


def _facts(standing: Standing) -> list[Any]:
    return [
        standing.limit_requests,
        standing.remaining_requests,
        standing.reset_requests_s,
        standing.limit_tokens,
        standing.remaining_tokens,
        standing.reset_tokens_s,
    ]
