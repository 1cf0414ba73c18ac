"""Asks the configured authenticators, in their order, who sends a request."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from commutator.contract.principal import ANONYMOUS, Authenticator, Credentials, Principal
from commutator.errors import AuthenticationError, PluginError

log = logging.getLogger(__name__)


class Gate:
    """The authenticators of one front-door process. Without any, everyone is ``ANONYMOUS``."""

    def __init__(
        self, authenticators: Sequence[tuple[str, Authenticator]] = (), then: Gate | None = None
    ) -> None:
        """``authenticators`` are pairs of a kind, for the log, and an authenticator.

        Those of ``then``, which starts and stops them, are asked after its own.
        """
        self._authenticators = list(authenticators)
        self._then = then
        self._started: list[tuple[str, Authenticator]] = []

    @property
    def known(self) -> Mapping[str, Principal]:
        """Who sends a value of the header ``Authorization``, if it is known at once."""
        if self._authenticators:
            return self._authenticators[0][1].known
        return {} if self._then is None else self._then.known

    @property
    def is_open(self) -> bool:
        """Whether nobody is asked who they are."""
        return not self._authenticators and (self._then is None or self._then.is_open)

    def after(self, kind: str, authenticator: Authenticator) -> Gate:
        """One that asks ``authenticator`` before those of this one, which starts and stops them."""
        return Gate([(kind, authenticator)], then=self)

    async def use(self, authenticators: Sequence[tuple[str, Authenticator]]) -> None:
        """Ask others from now on. Raises PluginError when one cannot start; nothing has changed."""
        others, before = Gate(authenticators), Gate()
        try:
            await others.start()
        except PluginError:
            await others.stop()
            raise
        before._started, self._started = self._started, others._started
        self._authenticators = others._authenticators
        await before.stop()

    async def start(self) -> None:
        """Start the authenticators. Raises PluginError when one cannot start."""
        for kind, authenticator in self._authenticators:
            try:
                await authenticator.start()
            except Exception as error:
                text = f"authenticator cannot start: {type(error).__name__}: {error}"
                raise PluginError(kind, text) from error
            self._started.append((kind, authenticator))

    async def stop(self) -> None:
        """Stop the started authenticators, the last one first. Exceptions are logged."""
        while self._started:
            kind, authenticator = self._started.pop()
            try:
                await authenticator.stop()
            except Exception:
                log.exception("authenticator %s failed to stop", kind)

    async def principal(self, credentials: Credentials) -> Principal:
        """Who sent the credentials. Raises AuthenticationError when no authenticator knows."""
        for kind, authenticator in tuple(self._authenticators):
            try:
                found = await authenticator.authenticate(credentials)
            except AuthenticationError:
                raise
            except Exception as error:
                log.exception("authenticator %s failed; the request is refused", kind)
                raise AuthenticationError(
                    "the credentials cannot be checked now; see the front door's log"
                ) from error
            if found is not None:
                return found
        if self._then is not None and not self._then.is_open:
            return await self._then.principal(credentials)
        if self.is_open:
            return ANONYMOUS
        raise AuthenticationError("no valid API key: send the header Authorization: Bearer KEY")
