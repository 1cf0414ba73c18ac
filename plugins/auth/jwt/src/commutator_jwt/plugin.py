"""Registers the authenticator of kind `jwt`. It imports PyJWT only where tokens are checked."""

from __future__ import annotations

from typing import Any

from commutator import hookimpl
from commutator.contract.principal import Authenticator
from commutator.contract.registration import AuthenticatorRegister
from commutator_jwt.config import JwtConfig


def _make(config: Any) -> Authenticator:
    from commutator_jwt.authenticator import JwtAuthenticator

    return JwtAuthenticator(config)


@hookimpl
def authenticator_register(register: AuthenticatorRegister) -> None:
    register("jwt", JwtConfig, _make)
