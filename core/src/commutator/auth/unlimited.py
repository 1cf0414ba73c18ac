"""The limiter of kind `unlimited`: it counts nothing, and refuses who has limits to count."""

from __future__ import annotations

from commutator.contract.limiter import Limiter, LimiterContext, RequestLimiter, Standing, Ticket
from commutator.contract.principal import Principal
from commutator.errors import RegistryError


class _Unlimited(Ticket):
    __slots__ = ()

    @property
    def standing(self) -> Standing:
        return Standing()


_TICKET = _Unlimited()


class Unlimited(RequestLimiter):
    """Admits every request of principals without limits, and none of others: nothing counts."""

    def __init__(self) -> None:
        super().__init__()
        self.ready.set()

    def begin(self, principal: Principal) -> bool:
        """Raises RegistryError for limits that a plugin or a file of principals came with."""
        if principal.limits.are_counted:
            raise RegistryError(
                f"{principal.name} has limits, and nothing here counts them: pip install "
                "commutator-limits, or remove them"
            )
        return False

    async def admit(
        self,
        principal: Principal,
        prompt_tokens: int,
        answers: int = 1,
        max_tokens: int | None = None,
    ) -> Ticket:
        del principal, prompt_tokens, answers, max_tokens
        return _TICKET

    def end(self, principal: Principal, ticket: Ticket | None, tokens: int | None) -> None:
        pass


class UnlimitedLimiter(Limiter):
    """Each front door for itself, as there is nothing to share."""

    def at_door(self, context: LimiterContext) -> RequestLimiter:
        del context
        return Unlimited()
