"""The shipped suite, and who the proxy may name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from commutator import Secret
from commutator.contract.principal import Authenticator, Credentials
from commutator.errors import AuthenticationError
from commutator_proxy_user import ProxyUser, ProxyUserConfig
from commutator_testing.authenticators import AuthenticatorContract


def sent(name: str) -> Credentials:
    return Credentials(bearer="of-the-proxy", headers={"X-Forwarded-User": name}, peer="10.0.0.1")


class TestProxyUser(AuthenticatorContract):
    @pytest.fixture
    def authenticator(self, tmp_path: Path) -> Authenticator:
        (tmp_path / "token").write_text("of-the-proxy\n")
        token = Secret(file=str(tmp_path / "token"))
        return ProxyUser(ProxyUserConfig(kind="proxy_user", token=token))

    @pytest.fixture
    def valid(self) -> Credentials:
        return sent("alice")

    def test_people_do_not_share_kv(self, authenticator: Authenticator) -> None:
        alice, bob = self.ask(authenticator, sent("alice"), sent("bob"))
        assert alice is not None
        assert bob is not None
        assert (alice.name, bob.name) == ("alice", "bob")
        assert alice.cache_salt != bob.cache_salt

    @pytest.mark.parametrize("name", ["", "a b", "a\n", "x" * 65])
    def test_what_is_no_name_is_refused(self, authenticator: Authenticator, name: str) -> None:
        with pytest.raises(AuthenticationError, match="X-Forwarded-User"):
            asyncio.run(authenticator.authenticate(sent(name)))
