"""Believes a proxy that signs people in: a token proves the proxy, a header names the person."""

from __future__ import annotations

import hmac
import re

from attrs import frozen

from commutator import Secret, hookimpl, setting
from commutator.contract.principal import Authenticator, AuthenticatorConfig, Credentials, Principal
from commutator.contract.registration import AuthenticatorRegister
from commutator.errors import AuthenticationError

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


@frozen(kw_only=True)
class ProxyUserConfig(AuthenticatorConfig):
    """A proxy before the front door that signs people in."""

    token: Secret = setting("What the proxy sends as its bearer token.")
    header: str = setting("The header in which it names the person.", "X-Forwarded-User")


class ProxyUser(Authenticator):
    """Each person that the proxy names is a principal, with a KV cache of its own."""

    def __init__(self, config: ProxyUserConfig) -> None:
        self._token = config.token.reveal().encode()
        self._header = config.header

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        sent = (credentials.bearer or "").encode(errors="surrogateescape")
        if not hmac.compare_digest(sent, self._token):
            return None
        name = credentials.headers.get(self._header, "")
        if not _NAME.fullmatch(name):
            raise AuthenticationError(f"{self._header}: expected a name, got {name[:80]!r}")
        return Principal(name=name, cache_salt=name)


@hookimpl
def authenticator_register(register: AuthenticatorRegister) -> None:
    register("proxy_user", ProxyUserConfig, ProxyUser)
