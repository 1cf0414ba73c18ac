"""Registers the limiter of kind `ledger`."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.limiter import Limiter, LimiterConfig, LimiterContext, RequestLimiter
from commutator.contract.registration import LimiterRegister
from commutator.contract.service import Service
from commutator_limits.limiter import LocalLimiter, SharedLimiter
from commutator_limits.service import LedgerService


class LedgerLimiter(Limiter):
    """A front door that is alone has the ledger itself, several ask the one at the hub."""

    def at_door(self, context: LimiterContext) -> RequestLimiter:
        if context.alone:
            return LocalLimiter(context.door, context.hub)
        return SharedLimiter(context.door, context.hub)

    def service(self) -> Service:
        return LedgerService()


@hookimpl
def limiter_register(register: LimiterRegister) -> None:
    register("ledger", LimiterConfig, lambda _: LedgerLimiter(), "beta")
