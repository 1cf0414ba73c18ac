"""The command that makes keys, and what commands say where a key is missing or too weak."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
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
from commutator.cli.main import main
from commutator.launcher.ports import reserved_port


def test_a_key_is_shown_once_and_its_hash_is_an_entry() -> None:
    done = CliRunner().invoke(main, ["key", "alice", "--expires", "2099-01-31"])
    assert done.exit_code == 0
    (key,) = re.findall(r"^cmt-\S{43}$", done.stderr, re.MULTILINE)
    assert key not in done.stdout
    (entry,) = yaml.safe_load(done.stdout)
    assert entry["name"] == "alice"
    assert entry["keys"] == [{"sha256": hash_of(key), "expires": "2099-01-31"}]


@pytest.mark.parametrize(
    "arguments", [["a b"], ["alice", "--expires", "soon"], ["alice", "--expires", "2020-01-31"]]
)
def test_a_wrong_name_or_date_makes_no_key(arguments: list[str]) -> None:
    done = CliRunner().invoke(main, ["key", *arguments])
    assert done.exit_code == 2
    assert "cmt-" not in done.output


async def run(*arguments: str, **env: str) -> Result:
    """A command in a thread, as the front door runs in this one."""
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, env=env)


def keys(permissions: tuple[Any, ...] = ()) -> tuple[str, Gate]:
    key = new_key()
    principal = KeyPrincipalConfig(
        name="alice", keys=(KeyConfig(sha256=hash_of(key)),), permissions=permissions
    )
    config = KeysConfig(kind="keys", principals=(principal,))
    return key, Gate([("keys", KeyAuthenticator(config))])


COMMANDS = (("worker", "ls"), ("kv", "ls"), ("route", "explain", "hello"), ("kv", "why", "hello"))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
async def test_without_a_key_a_command_says_where_it_goes(command: tuple[str, ...]) -> None:
    _, gate = keys()
    async with front_door(FakeDispatcher(), gate=gate) as door:
        none = await run(*command, COMMUTATOR_URL=door.url)
        wrong = await run(*command, COMMUTATOR_URL=door.url, COMMUTATOR_API_KEY=new_key())
    assert none.exit_code == wrong.exit_code == 1
    assert "answered 401" in none.output
    assert "set COMMUTATOR_API_KEY, or --api-key" in none.output
    assert "not one of this front door's" in wrong.output


@pytest.mark.parametrize("command", COMMANDS[:3], ids=" ".join)
async def test_without_the_permission_a_command_says_who_gives_it(command: tuple[str, ...]) -> None:
    key, gate = keys()
    async with front_door(FakeDispatcher(), gate=gate) as door:
        done = await run(*command, COMMUTATOR_URL=door.url, COMMUTATOR_API_KEY=key)
    assert done.exit_code == 1
    assert "answered 403" in done.output
    assert "`permissions` in the section `auth`" in done.output


async def test_with_the_permission_it_works() -> None:
    key, gate = keys(("metrics",))
    async with front_door(FakeDispatcher(), gate=gate) as door:
        env = {"COMMUTATOR_URL": door.url, "COMMUTATOR_API_KEY": key}
        done = await run("worker", "ls", **env)
        as_json = await run("worker", "ls", "--json", **env)
    assert done.exit_code == 0, done.output
    assert "fake-0" in done.output
    (worker,) = json.loads(as_json.output)
    assert (worker["worker_id"], worker["state"]) == ("fake-0", "ready")


async def test_the_operations_address_is_named() -> None:
    key, gate = keys()
    with reserved_port("127.0.0.1", 0) as port:
        admin = {"port": port}
        async with front_door(FakeDispatcher(), gate=gate, admin=admin) as door:
            env = {"COMMUTATOR_URL": door.url, "COMMUTATOR_API_KEY": key}
            refused = await run("worker", "ls", **env)
            found = await run(
                "worker", "ls", **env, COMMUTATOR_ADMIN_URL=f"http://127.0.0.1:{port}/"
            )
    assert "COMMUTATOR_ADMIN_URL" in refused.output
    assert found.exit_code == 0, found.output
    assert "fake-0" in found.output
