"""The conformance suite for authenticators: subclass it, define a fixture, run pytest."""

from __future__ import annotations

import asyncio
import re

from attrs import evolve

from commutator.contract.principal import Authenticator, Credentials, Principal
from commutator.errors import AuthenticationError

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_NOBODY = Credentials(bearer=None, headers={}, peer="127.0.0.1")
_STRANGE = ("", "x", "a.b.c", "..", "\x00", "Bearer x", "ä" * 100, "x" * 100_000, "\udcff")


class AuthenticatorContract:
    """What every authenticator must do.

    A fixture ``authenticator`` returns one that is not started, a fixture ``valid`` credentials
    that it accepts.
    """

    documented_in = (
        "Authenticator in docs/reference/contract/principal.md and docs/how-to/authenticate.md"
    )

    def test_valid_credentials_have_one_principal(
        self, authenticator: Authenticator, valid: Credentials
    ) -> None:
        first, second = self.ask(authenticator, valid, valid)
        assert isinstance(first, Principal)
        assert _NAME.fullmatch(first.name), "a name stands in logs, metrics and headers"
        assert first == second
        assert first.weight > 0

    def test_no_credentials_have_none(self, authenticator: Authenticator) -> None:
        assert self.ask(authenticator, _NOBODY) == [None]

    def test_what_strangers_send_has_none(
        self, authenticator: Authenticator, valid: Credentials
    ) -> None:
        """Neither a principal nor an exception that is no AuthenticationError."""
        sent = [*_STRANGE]
        if valid.bearer is not None:
            middle = len(valid.bearer) // 2
            other = "A" if valid.bearer[middle] != "A" else "B"
            sent += [
                valid.bearer[:-1],
                valid.bearer + "A",
                valid.bearer[:middle] + other + valid.bearer[middle + 1 :],
                valid.bearer.swapcase(),
            ]
        asked = [evolve(_NOBODY, bearer=token) for token in sent]
        assert self.ask(authenticator, *asked) == [None] * len(asked)

    def ask(
        self, authenticator: Authenticator, *credentials: Credentials
    ) -> list[Principal | None]:
        """Start it, ask it once for each of the credentials, and stop it; None where it refuses."""

        async def life() -> list[Principal | None]:
            await authenticator.start()
            try:
                return [await self._answer(authenticator, one) for one in credentials]
            finally:
                await authenticator.stop()

        return asyncio.run(life())

    async def _answer(
        self, authenticator: Authenticator, credentials: Credentials
    ) -> Principal | None:
        try:
            return await authenticator.authenticate(credentials)
        except AuthenticationError:
            return None
