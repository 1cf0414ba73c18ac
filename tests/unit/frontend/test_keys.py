"""API keys as named principals: their hashes, expiry, and a file that is read again."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve
from tests.support.front_door import FakeDispatcher, front_door

from commutator.auth.gate import Gate
from commutator.auth.keys import (
    KeyAuthenticator,
    KeyConfig,
    KeyPrincipalConfig,
    KeysConfig,
    hash_of,
    new_key,
)
from commutator.config.yaml_file import to_yaml
from commutator.contract.principal import ANONYMOUS, Authenticator, Credentials, Principal
from commutator.errors import AuthenticationError, PluginError


def sent(token: str | None) -> Credentials:
    return Credentials(bearer=token, headers={}, peer="127.0.0.1")


def principal(name: str, *keys: str, expires: str | None = None) -> KeyPrincipalConfig:
    known = tuple(KeyConfig(sha256=hash_of(key), expires=expires) for key in keys)
    return KeyPrincipalConfig(name=name, keys=known)


def authenticator(*principals: KeyPrincipalConfig, now_unix_s: float = 0.0) -> KeyAuthenticator:
    config = KeysConfig(kind="keys", principals=principals)
    return KeyAuthenticator(config, clock=lambda: now_unix_s)


def write(path: Path, *principals: tuple[str, str]) -> None:
    """As tools do that replace a file: at once."""
    entries = [{"name": name, "keys": [{"sha256": hash_of(key)}]} for name, key in principals]
    new = path.with_suffix(".new")
    new.write_text(to_yaml({"principals": entries}))
    new.replace(path)


async def test_each_key_of_a_principal_is_its_own() -> None:
    old, new, other = new_key(), new_key(), new_key()
    keys = authenticator(principal("alice", old, new), principal("bob", other))
    for key, name in ((old, "alice"), (new, "alice"), (other, "bob")):
        found = await keys.authenticate(sent(key))
        assert found is not None
        assert found.name == name
        assert found.cache_salt == f"principal/{name}"
    assert await keys.authenticate(sent(new_key())) is None
    assert await keys.authenticate(sent(None)) is None


async def test_a_key_ends_at_its_moment() -> None:
    key = new_key()
    config = principal("alice", key, expires="1970-01-02")
    day_s = 86_400.0
    assert await authenticator(config, now_unix_s=day_s - 1).authenticate(sent(key)) is not None
    with pytest.raises(AuthenticationError, match="expired on 1970-01-02"):
        await authenticator(config, now_unix_s=day_s).authenticate(sent(key))


@pytest.mark.security
async def test_only_keys_that_hold_are_known_at_once(tmp_path: Path) -> None:
    path, kept, expiring = tmp_path / "keys.yaml", new_key(), new_key()
    write(path, ("alice", kept))
    one = principal("bob", expiring, expires="1970-01-02")
    config = KeysConfig(kind="keys", principals=(one,), file=str(path), poll_s=3600.0)
    keys = KeyAuthenticator(config, clock=lambda: 0.0)
    gate = Gate([("keys", keys)])
    await gate.start()
    try:
        for token in (kept, expiring):
            await gate.principal(sent(token))
        with pytest.raises(AuthenticationError):
            await gate.principal(sent(new_key()))
        assert {header: found.name for header, found in gate.known.items()} == {
            f"Bearer {kept}": "alice"
        }
        write(path, ("carol", new_key()))
        assert await keys.look_at_file()
        assert not gate.known
    finally:
        await gate.stop()


@pytest.mark.security
async def test_a_key_that_we_did_not_make_is_none_even_if_its_hash_is_known() -> None:
    for weak in ("secret", "cmt-secret", "cmt-" + "ä" * 43):
        assert await authenticator(principal("alice", weak)).authenticate(sent(weak)) is None


def test_keys_are_random() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert {len(key) for key in keys} == {47}


def test_two_principals_cannot_have_the_same_name_or_key() -> None:
    key = new_key()
    with pytest.raises(ValueError, match='two principals have the name "alice"'):
        authenticator(principal("alice"), principal("alice"))
    with pytest.raises(ValueError, match='of "bob" is also one of "alice"'):
        authenticator(principal("alice", key), principal("bob", key))
    with pytest.raises(ValueError, match="expected 64 hexadecimal digits"):
        KeyConfig(sha256=key)


async def test_the_file_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, first, second = tmp_path / "keys.yaml", new_key(), new_key()
    write(path, ("alice", first))
    keys = KeyAuthenticator(KeysConfig(kind="keys", file=str(path), poll_s=3600.0))
    await keys.start()
    try:
        assert await keys.authenticate(sent(first)) is not None
        assert not await keys.look_at_file()
        write(path, ("bob", second))
        assert await keys.look_at_file()
        assert await keys.authenticate(sent(first)) is None
        assert await keys.authenticate(sent(second)) is not None
        for broken in ("principals: [{name: x, colour: red}]", "principals: [", None):
            if broken is None:
                path.unlink()
            else:
                path.write_text(broken)
            assert not await keys.look_at_file()
            assert not await keys.look_at_file()  # and it is told of once
            assert await keys.authenticate(sent(second)) is not None
        assert [record.levelname for record in caplog.records] == ["ERROR"] * 3
        assert "principals[0].colour: unknown key" in caplog.text
        assert "the keys from before still apply" in caplog.text
        write(path, ("alice", first))
        assert await keys.look_at_file()
        assert await keys.authenticate(sent(first)) is not None
    finally:
        await keys.stop()


async def test_a_front_door_without_its_file_does_not_start(tmp_path: Path) -> None:
    config = KeysConfig(kind="keys", file=str(tmp_path / "none.yaml"))
    with pytest.raises(PluginError, match=r"none\.yaml.*(?s:.*)No such file"):
        await Gate([("keys", KeyAuthenticator(config))]).start()


class Says(Authenticator):
    """Answers the same to everyone."""

    def __init__(self, answer: Principal | Exception | None) -> None:
        self._answer = answer

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


async def test_the_first_that_knows_decides() -> None:
    alice, bob = Principal(name="alice"), Principal(name="bob")
    refused = AuthenticationError("expired")
    assert await Gate().principal(sent(None)) is ANONYMOUS
    gate = Gate([("a", Says(None)), ("b", Says(alice)), ("c", Says(bob))])
    assert await gate.principal(sent("x")) is alice
    with pytest.raises(AuthenticationError, match="expired"):
        await Gate([("a", Says(refused)), ("b", Says(alice))]).principal(sent("x"))
    with pytest.raises(AuthenticationError, match="no valid API key"):
        await Gate([("a", Says(None))]).principal(sent("x"))


@pytest.mark.security
async def test_an_authenticator_that_fails_lets_nobody_in(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate([("a", Says(RuntimeError("no network"))), ("b", Says(Principal(name="bob")))])
    with pytest.raises(AuthenticationError, match="cannot be checked now"):
        await gate.principal(sent("x"))
    assert "no network" in caplog.text


async def test_the_principal_stands_beside_the_request() -> None:
    key, dispatcher = new_key(), FakeDispatcher()
    config = evolve(principal("alice", key), weight=2.5)
    async with front_door(dispatcher, gate=Gate([("keys", authenticator(config))])) as door:
        door.session.headers["Authorization"] = f"Bearer {key}"
        assert (await door.chat())[0] == 200
        assert (await door.complete())[0] == 200
        door.session.headers["Authorization"] = f"Bearer {new_key()}"
        status, body = await door.chat()
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
    assert [(caller.principal, caller.weight) for caller in dispatcher.callers] == [
        ("alice", 2.5)
    ] * 2
