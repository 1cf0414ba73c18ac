"""Who sends a request, and what its rights allow: what an authenticator plugin implements.

Core brings the kind `keys`.
"""

from commutator.contract.principal import (
    Authenticator,
    AuthenticatorConfig,
    Credentials,
    Limits,
    Principal,
    PrincipalConfig,
)
from commutator.contract.registration import AuthenticatorRegister

__all__ = [
    "Authenticator",
    "AuthenticatorConfig",
    "AuthenticatorRegister",
    "Credentials",
    "Limits",
    "Principal",
    "PrincipalConfig",
]
