"""Checks tokens and finds the principals that they are about."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import jwt

from commutator.contract.principal import Authenticator, Credentials, Principal
from commutator.errors import AuthenticationError
from commutator_jwt.config import JwtConfig
from commutator_jwt.keys import KeySet, KeySource, keys_of_file

_LONGEST = 8 << 10
_SEGMENTS = 3


class JwtAuthenticator(Authenticator):
    """Tells principals by the signed tokens of one issuer."""

    def __init__(self, config: JwtConfig) -> None:
        self._config = config
        self._file_keys: KeySet | None = None
        self.source = KeySource(config, time.monotonic)
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        if self._config.key_file is not None:
            self._file_keys = keys_of_file(self._config.key_file)
            return
        await self.source.fetch()
        self._running = asyncio.create_task(self.source.run())

    async def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        token = credentials.bearer
        if token is None or len(token) > _LONGEST or token.count(".") != _SEGMENTS - 1:
            return None
        try:
            header = jwt.get_unverified_header(token)
        except jwt.PyJWTError:
            return None
        claims = self._verified(token, header)
        return principal_of(self._config, claims)

    def _verified(self, token: str, header: Mapping[str, Any]) -> dict[str, Any]:
        """The claims of a token that the issuer signed for us. Raises AuthenticationError."""
        config, algorithm, key_id = self._config, header.get("alg"), header.get("kid")
        if algorithm not in config.algorithms:
            raise AuthenticationError("the token is not valid: its algorithm is not accepted")
        keys = self._file_keys or self.source.keys
        key = None if keys is None else keys.find(key_id, algorithm)
        if key is None:
            if self._file_keys is None:
                self.source.want_newer()
            raise AuthenticationError("the token is not valid: its key is not known; try again")
        try:
            found: dict[str, Any] = jwt.decode(
                token,
                key.key,
                algorithms=[algorithm],
                audience=config.audience,
                issuer=config.issuer,
                leeway=config.leeway_s,
                options={"require": ["exp", "iss", "aud"]},
            )
        except jwt.PyJWTError as error:
            raise AuthenticationError(f"the token is not valid: {error}") from error
        return found


def principal_of(config: JwtConfig, claims: Mapping[str, Any]) -> Principal:
    """The principal of the claims of a valid token, with the rights of its first role.

    Raises AuthenticationError when it has no name or no role.
    """
    name, given = claims.get(config.name_claim), claims.get(config.roles_claim)
    named = {given} if isinstance(given, str) else set()
    if isinstance(given, list):
        named = {role for role in given if isinstance(role, str)}
    role = next((rights for role, rights in config.roles.items() if role in named), None)
    if role is None:
        raise AuthenticationError(
            f"the token names no role of this deployment in its claim {config.roles_claim}"
        )
    try:
        return role.principal(name if isinstance(name, str) else "")
    except ValueError as error:
        raise AuthenticationError(
            f"the token's claim {config.name_claim} is no name of a principal: {error}"
        ) from error
