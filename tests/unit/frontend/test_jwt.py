"""Tokens of an issuer that the test runs: discovery, rotation, and every token that is no right."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from attrs import define, field
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from tests.support.virtual_time import in_virtual_time

from commutator.config.kinds import config_converter
from commutator.contract.principal import Credentials, PrincipalConfig
from commutator.errors import AuthenticationError
from commutator.plugins import installed_plugins
from commutator.schema import StructureError, structure

jwt = pytest.importorskip("jwt")

from commutator_jwt.authenticator import JwtAuthenticator  # noqa: E402
from commutator_jwt.config import JwtConfig  # noqa: E402
from commutator_jwt.keys import KeySet, KeySource  # noqa: E402

pytestmark = pytest.mark.security

RSA = rsa.generate_private_key(public_exponent=65537, key_size=2048)
STRANGER = rsa.generate_private_key(public_exponent=65537, key_size=2048)
EC = ec.generate_private_key(ec.SECP256R1())
ROLES = {
    "operators": PrincipalConfig(permissions=("admin",)),
    "staff": PrincipalConfig(models=("a",)),
}


@define
class Issuer:
    """Serves discovery and its keys; the test changes them."""

    url: str = ""
    keys: dict[str, Any] = field(factory=lambda: {"one": RSA})
    fetches: int = 0
    broken: bool = False
    instead: dict[str, dict[str, Any]] = field(factory=dict)
    """Arguments of a response, by path."""

    def token(self, kid: str | None = "one", key: Any = None, **claims: Any) -> str:
        now = int(time.time())
        said = {"iss": self.url, "aud": "us", "sub": "ada", "roles": ["staff"], "exp": now + 600}
        said |= claims
        key = key or self.keys[kid or "one"]
        algorithm = "ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256"
        headers = {} if kid is None else {"kid": kid}
        left = {name: value for name, value in said.items() if value is not None}
        return str(jwt.encode(left, key, algorithm=algorithm, headers=headers))

    def app(self) -> web.Application:
        async def discovery(_: web.Request) -> web.Response:
            return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

        async def jwks(_: web.Request) -> web.Response:
            self.fetches += 1
            if self.broken:
                return web.Response(text="<html>")
            entries = []
            for kid, key in self.keys.items():
                name = "ES256" if isinstance(key, ec.EllipticCurvePrivateKey) else "RS256"
                entry = jwt.get_algorithm_by_name(name).to_jwk(key.public_key(), as_dict=True)
                entries.append({**entry, "kid": kid, "use": "sig"})
            return web.json_response({"keys": entries})

        @web.middleware
        async def other(request: web.Request, handler: Any) -> web.StreamResponse:
            given = self.instead.get(request.path)
            answer: web.StreamResponse = (
                await handler(request) if given is None else web.Response(**given)
            )
            return answer

        app = web.Application(middlewares=[other])
        app.add_routes([
            web.get("/.well-known/openid-configuration", discovery), web.get("/keys", jwks),
        ])  # fmt: skip
        return app


@asynccontextmanager
async def trusting(
    issuer: Issuer | None = None, **options: Any
) -> AsyncIterator[tuple[Issuer, JwtAuthenticator]]:
    issuer = issuer or Issuer()
    runner = web.AppRunner(issuer.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    issuer.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = JwtConfig(
        **{"kind": "jwt", "issuer": issuer.url, "audience": "us", "roles": ROLES, **options}
    )
    authenticator = JwtAuthenticator(config)
    try:
        await authenticator.start()
        yield issuer, authenticator
    finally:
        await authenticator.stop()
        await runner.cleanup()


def sent(token: str) -> Credentials:
    return Credentials(bearer=token, headers={}, peer=None)


async def test_a_role_gives_a_name_its_rights() -> None:
    async with trusting() as (issuer, authenticator):
        ada = await authenticator.authenticate(sent(issuer.token()))
        assert ada is not None
        assert (ada.name, ada.cache_salt) == ("ada", "principal/ada")
        assert ada.models == frozenset({"a"})
        both = issuer.token(sub="eve", roles=["staff", "operators"])
        eve = await authenticator.authenticate(sent(both))
        assert eve is not None
        assert eve.may("admin")
        assert await authenticator.authenticate(sent("cmt-" + "x" * 43)) is None


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": 1}, "expired"),
        ({"exp": None}, 'missing the "exp"'),
        ({"nbf": int(time.time()) + 9000}, "not yet valid"),
        ({"exp": int(time.time()) - 40}, "expired"),
        ({"iat": int(time.time()) + 9000}, "not yet valid"),
        ({"aud": "others"}, "Audience"),
        ({"aud": None}, 'missing the "aud"'),
        ({"iss": "https://evil.example"}, "issuer"),
        ({"roles": ["guest"]}, "no role"),
        ({"roles": None}, "no role"),
        ({"roles": {"staff": 1}}, "no role"),
        ({"sub": "a b\nc"}, "no name of a principal"),
        ({"sub": None}, "no name of a principal"),
    ],
)
async def test_a_token_of_the_issuer_is_not_enough(claims: dict[str, Any], reason: str) -> None:
    async with trusting() as (issuer, authenticator):
        with pytest.raises(AuthenticationError, match=reason):
            await authenticator.authenticate(sent(issuer.token(**claims)))


async def test_the_issuers_clock_may_be_a_little_off() -> None:
    async with trusting(leeway_s=600.0) as (issuer, authenticator):
        now = int(time.time())
        late = issuer.token(exp=now - 300, iat=now - 900)
        assert await _accepts(authenticator, late)
        early = issuer.token(nbf=now + 300, iat=now + 300)
        assert await _accepts(authenticator, early)


async def test_a_token_of_more_than_8_kib_is_nobodys() -> None:
    async with trusting() as (issuer, authenticator):
        assert await _accepts(authenticator, issuer.token(more="x" * 5_000))
        assert await authenticator.authenticate(sent(issuer.token(more="x" * 7_000))) is None


def unsigned(header: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    parts = (json.dumps(header).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)


async def test_no_forged_token_is_accepted() -> None:
    async with trusting() as (issuer, authenticator):
        claims = jwt.decode(issuer.token(), options={"verify_signature": False})
        pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        confused = jwt.PyJWS().encode(
            json.dumps(claims).encode(), b"secret" * 10, algorithm="HS256", headers={"kid": "one"}
        )
        import hashlib
        import hmac

        head = unsigned({"alg": "HS256", "kid": "one", "typ": "JWT"}, claims).rstrip(".")
        mac = hmac.new(pem, head.encode(), hashlib.sha256).digest()
        with_public_key = f"{head}.{base64.urlsafe_b64encode(mac).rstrip(b'=').decode()}"
        good = issuer.token()
        payload = good.split(".")[1]
        changed = payload[:20] + ("A" if payload[20] != "A" else "B") + payload[21:]
        for forged in (
            unsigned({"alg": "none", "kid": "one"}, claims),
            unsigned({"alg": "None"}, claims),
            confused,
            with_public_key,
            issuer.token(key=STRANGER),
            issuer.token(key=EC),
            good.replace(payload, changed),
        ):
            with pytest.raises(AuthenticationError, match="not valid"):
                await authenticator.authenticate(sent(forged))


async def test_rotated_keys_are_found_and_old_ones_end() -> None:
    async with trusting(refetch_s=0.01) as (issuer, authenticator):
        old = issuer.token()
        assert await authenticator.authenticate(sent(old)) is not None
        issuer.keys = {"two": EC}
        new = issuer.token("two")
        with pytest.raises(AuthenticationError, match="its key is not known"):
            await authenticator.authenticate(sent(new))
        async with asyncio.timeout(30):
            while authenticator.source.fetches < 2 or not await _accepts(authenticator, new):
                await asyncio.sleep(0.01)
        assert not await _accepts(authenticator, old)
        issuer.broken = True
        await _accepts(authenticator, issuer.token("three", EC))
        async with asyncio.timeout(30):
            while issuer.fetches < 3:
                await asyncio.sleep(0.01)
        assert await _accepts(authenticator, new), "the keys from before still apply"


async def _accepts(authenticator: JwtAuthenticator, token: str) -> bool:
    try:
        return await authenticator.authenticate(sent(token)) is not None
    except AuthenticationError:
        return False


async def test_random_key_ids_cause_no_fetches() -> None:
    async with trusting(refetch_s=3600.0) as (issuer, authenticator):
        for number in range(200):
            with pytest.raises(AuthenticationError):
                await authenticator.authenticate(sent(issuer.token(f"x{number}", RSA)))
            await asyncio.sleep(0)
        assert issuer.fetches == 1


async def test_keys_do_not_come_over_plain_http_from_elsewhere() -> None:
    config = JwtConfig(kind="jwt", issuer="http://issuer.example", audience="us", roles=ROLES)
    with pytest.raises(AuthenticationError, match="https only"):
        await JwtAuthenticator(config).start()


def entry(key: Any, **fields: Any) -> dict[str, Any]:
    """A key of a JWKS."""
    public: dict[str, Any] = jwt.get_algorithm_by_name("RS256").to_jwk(key, as_dict=True)
    return public | fields


def test_a_token_without_a_key_id_is_checked_by_the_only_key_that_fits() -> None:
    one, other = (entry(key.public_key()) for key in (RSA, STRANGER))
    assert KeySet.of({"keys": [one]}).find(None, "RS256") is not None
    assert KeySet.of({"keys": [one]}).find(None, "ES256") is None
    assert KeySet.of({"keys": [one, other]}).find(None, "RS256") is None
    twice = KeySet.of({"keys": [one | {"kid": "a"}, other | {"kid": "a"}]})
    assert twice.find("a", "RS256") is None


@pytest.mark.parametrize(
    "unusable",
    [
        entry(RSA.public_key(), use="enc"),
        {"kty": "oct", "k": "c2VjcmV0", "kid": "one"},
        {"kty": "RSA", "n": 1},
        "a",
    ],
)
def test_keys_for_encryption_and_secrets_check_no_token(unusable: Any) -> None:
    with pytest.raises(ValueError, match="no key that can be used"):
        KeySet.of({"keys": [unusable]})
    good = entry(STRANGER.public_key(), kid="good")
    keys = KeySet.of({"keys": [unusable, good]})
    assert keys.find("one", "RS256") is None
    assert keys.find("good", "RS256") is not None


DISCOVERY = "/.well-known/openid-configuration"
EVIL = {"issuer": "https://evil.example", "jwks_uri": "http://127.0.0.1:1/keys"}


@pytest.mark.parametrize(
    ("path", "answer", "problem"),
    [
        ("/keys", {"status": 302, "headers": {"Location": "/moved"}}, "answered 302"),
        ("/keys", {"body": b" " * ((1 << 20) + 1)}, "too large"),
        (DISCOVERY, {"text": "[]"}, "not that of the issuer"),
        (DISCOVERY, {"text": json.dumps(EVIL)}, "not that of the issuer"),
    ],
)
async def test_keys_come_from_where_the_issuer_says_only(
    path: str, answer: dict[str, Any], problem: str
) -> None:
    """Not from where a redirect leads or another issuer's document says, and not without end."""
    moved = {"keys": [entry(RSA.public_key(), kid="one")]}
    issuer = Issuer(instead={path: answer, "/moved": {"text": json.dumps(moved)}})
    with pytest.raises(AuthenticationError, match=problem):
        async with trusting(issuer):
            pass


def source_of(
    fetched_s: list[float], monkeypatch: pytest.MonkeyPatch, failing: tuple[int, ...] = ()
) -> KeySource:
    """Notes when it fetches; the fetches of these numbers fail."""
    clock = asyncio.get_running_loop().time
    config = JwtConfig(
        kind="jwt", issuer="https://issuer.example", audience="us", roles=ROLES,
        refresh_s=300.0, refetch_s=10.0,
    )  # fmt: skip
    source = KeySource(config, clock)

    async def fetch() -> None:
        source._fetched_s = clock()
        fetched_s.append(clock())
        if len(fetched_s) in failing:
            raise AuthenticationError("no keys")

    monkeypatch.setattr(source, "fetch", fetch)
    return source


@in_virtual_time
async def test_keys_are_fetched_again_regularly_also_after_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched_s: list[float] = []
    running = asyncio.create_task(source_of(fetched_s, monkeypatch, failing=(2,)).run())
    await asyncio.sleep(1_000)
    running.cancel()
    assert fetched_s == [300.0, 600.0, 900.0]


@in_virtual_time
async def test_an_unknown_key_has_the_keys_fetched_once_and_not_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fetched_s: list[float] = []
    source = source_of(fetched_s, monkeypatch)
    running = asyncio.create_task(source.run())
    source.want_newer()
    await asyncio.sleep(5)
    source.want_newer()
    await asyncio.sleep(100)
    running.cancel()
    assert fetched_s == [0.0, 10.0]


@pytest.mark.parametrize("algorithms", [["HS256"], ["none"], []])
def test_signatures_that_everyone_can_make_cannot_be_configured(algorithms: list[str]) -> None:
    settings = {
        "kind": "jwt", "issuer": "i", "audience": "us", "roles": {}, "algorithms": algorithms,
    }  # fmt: skip
    with pytest.raises(StructureError, match="algorithms"):
        structure(config_converter(installed_plugins()), settings, JwtConfig)
