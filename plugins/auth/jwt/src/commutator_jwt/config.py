"""The options of the authenticator `jwt`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import Attribute, frozen

from commutator import PositiveSeconds, Seconds, setting
from commutator.contract.principal import AuthenticatorConfig, PrincipalConfig

Algorithm = Literal[
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"
]
"""Signatures by a key pair. With HS256 and its like, every checker of tokens could also make them,
and an issuer's public key would pass for the secret; `none` is no signature at all."""


def _not_empty(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if not value:
        raise ValueError("expected at least one")


@frozen(kw_only=True)
class JwtConfig(AuthenticatorConfig):
    """Principals by signed tokens: JSON Web Tokens, as OpenID Connect providers issue them."""

    issuer: str = setting("The `iss` of a token; its keys are found by discovery at this URL.")
    audience: str = setting("The `aud` of a token: what the issuer calls this deployment.")
    jwks_url: str | None = setting("Where the issuer's keys are, in place of discovery.", None)
    key_file: str | None = setting(
        "A PEM file with the issuer's public key, or a JWKS file, in place of discovery.", None
    )
    algorithms: tuple[Algorithm, ...] = setting(
        "The signatures accepted, whatever a token names.",
        ("RS256", "ES256", "EdDSA"),
        validator=_not_empty,
    )
    leeway_s: Seconds = setting("How far the issuer's clock may be from ours.", 30.0)
    refresh_s: PositiveSeconds = setting("How often the keys are fetched again.", 300.0)
    refetch_s: PositiveSeconds = setting(
        "Tokens that name an unknown key have the keys fetched at most this often.", 10.0
    )
    name_claim: str = setting("The claim that names the principal.", "sub")
    roles_claim: str = setting("The claim with the roles, a list or one text.", "roles")
    roles: Mapping[str, PrincipalConfig] = setting(
        "The rights of each role. A principal has those of the first one here that its token "
        "names; a token that names none is refused."
    )
