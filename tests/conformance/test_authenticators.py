"""The authenticators that we ship, held against the suite for every one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from commutator.auth.keys import (
    KeyAuthenticator,
    KeyConfig,
    KeyPrincipalConfig,
    KeysConfig,
    hash_of,
    new_key,
)
from commutator.contract.principal import Authenticator, Credentials, PrincipalConfig
from commutator_testing import AuthenticatorContract


class TestKeys(AuthenticatorContract):
    KEY = new_key()

    @pytest.fixture
    def authenticator(self) -> Authenticator:
        principal = KeyPrincipalConfig(name="alice", keys=(KeyConfig(sha256=hash_of(self.KEY)),))
        return KeyAuthenticator(KeysConfig(kind="keys", principals=(principal,)))

    @pytest.fixture
    def valid(self) -> Credentials:
        return Credentials(bearer=self.KEY, headers={}, peer=None)


class TestJwt(AuthenticatorContract):
    KEY = ec.generate_private_key(ec.SECP256R1())

    @pytest.fixture
    def authenticator(self, tmp_path: Path) -> Authenticator:
        pytest.importorskip("jwt")
        from commutator_jwt.authenticator import JwtAuthenticator
        from commutator_jwt.config import JwtConfig

        pem = self.KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / "key.pem").write_bytes(pem)
        config = JwtConfig(
            kind="jwt", issuer="https://issuer.example", audience="us",
            key_file=str(tmp_path / "key.pem"), roles={"staff": PrincipalConfig()},
        )  # fmt: skip
        return JwtAuthenticator(config)

    @pytest.fixture
    def valid(self) -> Credentials:
        jwt = pytest.importorskip("jwt")
        claims = {
            "iss": "https://issuer.example", "aud": "us", "sub": "ada", "roles": "staff",
            "exp": int(time.time()) + 600,
        }  # fmt: skip
        token = jwt.encode(claims, self.KEY, algorithm="ES256")
        return Credentials(bearer=token, headers={}, peer=None)
