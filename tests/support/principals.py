"""Principals whose names are their keys."""

from __future__ import annotations

from collections.abc import Sequence

from commutator.auth.gate import Gate
from commutator.contract.principal import Authenticator, Credentials, Principal

__all__ = ["gate_of", "key_of"]


class _ByName(Authenticator):
    def __init__(self, principals: Sequence[Principal]) -> None:
        self._principals = {one.name: one for one in principals}

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        return self._principals.get(credentials.bearer or "")


def gate_of(*principals: Principal) -> Gate:
    """Knows each of ``principals`` by its name as bearer token."""
    return Gate([("by name", _ByName(principals))])


def key_of(name: str) -> dict[str, str]:
    """The header that a principal sends."""
    return {"Authorization": f"Bearer {name}"}
