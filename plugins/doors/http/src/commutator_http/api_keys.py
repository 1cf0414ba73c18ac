"""`frontend.api_keys`: the simple form of keys, for one principal that may do everything."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from commutator.contract.principal import Authenticator, Credentials, Principal

__all__ = ["DEFAULT", "StaticKeys"]

DEFAULT = Principal(name="default", permissions=frozenset({"admin"}))
"""The principal of every such key. It has no salt of its own: its clients' salts are all there is,
as without keys."""


class StaticKeys(Authenticator):
    """Compares a bearer token with a few keys, which may be short and in any alphabet."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._accepted = [key.encode() for key in keys]

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        if credentials.bearer is None:
            return None
        given = credentials.bearer.encode(errors="surrogateescape")
        # Compare every key, each in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(given, key) for key in self._accepted]
        return DEFAULT if any(matches) else None
