"""Who may change a running deployment over HTTP, and what is noted of it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from attrs import define, field
from click.testing import CliRunner
from tests.support.front_door import FakeDispatcher, FrontDoor, front_door
from tests.support.principals import gate_of, key_of

from commutator.cli.main import main
from commutator.contract.observer import AnsweredRequest, Observer
from commutator.contract.operations import OPERATIONS_PREFIX
from commutator.contract.principal import Limits, Principal
from commutator.contract.registry import Registry
from commutator.contract.worker import Role
from commutator.launcher.ports import reserved_port
from commutator_http.administration import admin_routes

pytestmark = pytest.mark.security

ACT = "/admin/workers/fake-0/drain"
LIMITS = Limits(requests_per_minute=1)
PRINCIPALS = (
    Principal(name="root", permissions=frozenset({"admin"}), limits=LIMITS),
    Principal(name="watcher", permissions=frozenset({"metrics", "explain", "pin"}), limits=LIMITS),
    Principal(name="user", limits=LIMITS),
)
"""Each one's name is its key."""


@define
class OneWorker:
    """A registry that knows fake-0, and notes what it is asked to change."""

    done: list[tuple[str, object]] = field(factory=list)

    def view_age_s(self) -> float:
        return 0.0

    async def set_draining(self, worker_id: str, draining: bool) -> bool:
        self.done.append((worker_id, draining))
        return worker_id == "fake-0"

    async def set_role(self, worker_id: str, role: Role) -> bool:
        self.done.append((worker_id, role))
        return worker_id == "fake-0"


@define
class Noted(Observer):
    answered: list[AnsweredRequest] = field(factory=list)

    def request_answered(self, answered: AnsweredRequest) -> None:
        self.answered.append(answered)


@asynccontextmanager
async def door_of(registry: OneWorker, **options: Any) -> AsyncIterator[FrontDoor]:
    async with front_door(FakeDispatcher(), **options) as door:
        door.services.registry = cast("Registry", registry)
        door.services.observer = Noted()
        yield door


@pytest.fixture
def socket_path() -> Iterator[str]:
    # Paths of Unix sockets are short, and pytest's folders are not.
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/door.sock"


async def status(url: str, key: str | None = None, method: str = "POST") -> int:
    headers = {} if key is None else key_of(key)
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, headers=headers) as answer,
    ):
        return answer.status


async def over(socket_path: str, path: str) -> tuple[int, Any]:
    connector = aiohttp.UnixConnector(socket_path)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.post(f"http://localhost{path}") as answer,
    ):
        return answer.status, await answer.json()


async def test_without_keys_only_the_user_of_the_run_may_on_its_unix_socket(
    socket_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = OneWorker()
    async with door_of(registry, local_socket=socket_path) as door:
        with caplog.at_level(logging.INFO):
            code, body = await door.post(ACT, {})
            assert (code, body["error"]["code"]) == (403, "permission_denied")
            assert registry.done == []
            assert await over(socket_path, ACT) == (200, {})
        assert registry.done == [("fake-0", True)]
        mine = f"(uid {os.getuid()})"
        assert [line for line in caplog.messages if mine in line and "fake-0/drain" in line]
        noted = cast("Noted", door.services.observer).answered
        assert [(one.path, one.status) for one in noted] == [(ACT, 403), (ACT, 200)]
        assert str(noted[1].peer).endswith(mine)


async def test_with_keys_only_the_permission_admin_opens_any_of_the_paths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = OneWorker()
    async with door_of(registry, gate=gate_of(*PRINCIPALS)) as door:
        routes = [*admin_routes(door.services, lambda _: "")]
        assert len(routes) == 12
        with caplog.at_level(logging.INFO):
            for route in routes:
                assert route.path.startswith(OPERATIONS_PREFIX)
                url = door.url + route.path.format(id="fake-0", role="both")
                assert await status(url, None, route.method) == 401
                assert await status(url, "stranger", route.method) == 401
                assert await status(url, "watcher", route.method) == 403
                assert await status(url, "user", route.method) == 403
            assert registry.done == []
            for _ in range(3):  # its limit of requests is for what clients generate
                assert await status(door.url + ACT, "root") == 200
        assert registry.done == [("fake-0", True)] * 3
        assert "root: workers/fake-0/drain" in caplog.messages
        assert [line for line in caplog.messages if line.startswith("refused: workers/fake-0/dr")]
        noted = cast("Noted", door.services.observer).answered
        assert [one.principal for one in noted if one.status == 200] == ["root"] * 3


@pytest.mark.parametrize("keys", [True, False])
async def test_on_the_address_of_operators_acts_need_a_key_too(keys: bool) -> None:
    registry = OneWorker()
    with reserved_port("127.0.0.1", 0) as port:
        options = {"gate": gate_of(*PRINCIPALS)} if keys else {}
        async with door_of(registry, admin={"port": port}, **options) as door:
            operators = f"http://127.0.0.1:{port}"
            assert await status(f"{operators}/health", method="GET") == 200
            assert await status(operators + ACT) == (401 if keys else 403)
            assert await status(operators + ACT, "watcher") == 403
            assert await status(door.url + ACT, "root") == 404
            assert registry.done == []
            assert await status(operators + ACT, "root") == (200 if keys else 403)


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("/admin/workers/fake-9/drain", 404, "no worker 'fake-9'"),
        ("/admin/workers/fake-0/role/boss", 400, "expected one of"),
        ("/admin/tiers/verify?timeout_s=nan", 400, "timeout_s: expected"),
        ("/admin/tiers/verify?timeout_s=1e9", 400, "timeout_s: expected"),
        ("/admin/tiers/evict?worker=w", 404, "no worker 'w'"),
        ("/admin/tiers/evict?model=m", 400, "no worker is up"),
        ("/admin/tiers/evict", 400, "fake-0 answers no questions"),
        ("/admin/tiers/explain", 400, "body: "),
    ],
)
async def test_what_cannot_be_done_is_said(
    socket_path: str, path: str, code: int, says: str
) -> None:
    async with door_of(OneWorker(), local_socket=socket_path):
        found, body = await over(socket_path, path)
    assert found == code
    assert says in body["error"]["message"]


async def test_with_a_key_commands_need_no_file_of_the_machine() -> None:
    registry = OneWorker()
    async with door_of(registry, gate=gate_of(*PRINCIPALS)) as door:
        env = {"COMMUTATOR_URL": door.url, "COMMUTATOR_API_KEY": "root"}
        command = ["kv", "ls"]
        done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
        assert "answers no questions" in done.output
        env["COMMUTATOR_API_KEY"] = "watcher"
        done = await asyncio.to_thread(CliRunner().invoke, main, command, env=env)
        assert "answered 403" in done.output
        assert "`permissions` in the section `auth`" in done.output


async def test_another_user_of_the_machine_is_told_what_to_do(socket_path: str) -> None:
    async with door_of(OneWorker(), local_socket=socket_path) as door:
        await asyncio.to_thread(Path(socket_path).unlink)  # out of reach, as for another user
        done = await asyncio.to_thread(CliRunner().invoke, main, ["kv", "ls", "--url", door.url])
    assert done.exit_code == 1
    assert "as the user who started it, or set COMMUTATOR_API_KEY" in done.output.replace("\n", " ")
