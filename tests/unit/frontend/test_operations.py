"""What plugins serve operators on a front door, and what is said where a plugin is absent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import entry_points
from typing import Any

import pytest
from aiohttp import web
from tests.support.front_door import FakeDispatcher, front_door
from tests.support.principals import gate_of, key_of

from commutator.config.kinds import unknown_kind
from commutator.contract.operations import (
    Operations,
    OperationsConfig,
    OperationsDoor,
    OperationsRoute,
)
from commutator.contract.principal import Principal
from commutator.errors import ConfigError
from commutator.plugins import PluginHost, load_plugins

PRINCIPALS = (Principal(name="root", permissions=frozenset({"admin"})), Principal(name="user"))


def without_console() -> PluginHost:
    found = [one for one in entry_points(group="commutator") if one.name != "console"]
    return load_plugins(found=found)


class Notes(Operations):
    """A route of each kind of need; ``doors`` are those it was asked about."""

    def __init__(self, page: str = "/notes") -> None:
        self.doors: list[OperationsDoor] = []
        self._page = page

    def routes(self, door: OperationsDoor) -> Iterable[OperationsRoute]:
        self.doors.append(door)

        async def said(request: web.Request) -> web.Response:
            return web.json_response({"path": request.path})

        yield OperationsRoute(method="POST", path="/admin/notes", needs="act", handle=said)
        yield OperationsRoute(method="GET", path="/admin/notes", needs="watch", handle=said)
        yield OperationsRoute(method="GET", path=self._page, needs="nothing", handle=said)


def _given(one: Notes, _config: object, _context: object) -> Notes:
    return one


def host_with(*offered: Notes) -> PluginHost:
    host = without_console()
    for number, one in enumerate(offered):
        kind = f"notes{number}"
        host.operations.add(
            load_plugins(found=[]).installed[0].origin,
            kind,
            OperationsConfig,
            partial(_given, one),
            "alpha",
        )
    return host


def chosen(number: int = 1) -> Iterator[OperationsConfig]:
    return (OperationsConfig(kind=f"notes{one}") for one in range(number))


async def test_without_the_console_one_sentence_names_its_package_and_the_rest_serves() -> None:
    async with front_door(FakeDispatcher(), host=without_console()) as door:
        for path in ("/ui", "/admin/live"):
            code, body = await door.get(path)
            assert code == 404, path
            assert "pip install commutator-console" in body["error"]["message"]
        for path in ("/health", "/ready", "/v1/models"):
            code, _ = await door.get(path)
            assert code == 200, path
        for method in ("GET", "HEAD"):
            async with door.session.request(method, f"{door.url}/") as answer:
                assert (answer.status, answer.content_type) == (200, "text/plain")
    async with front_door(FakeDispatcher(), operations=[]) as door:
        assert (await door.get("/ui"))[0] == 404, "it was turned off"


def test_a_configuration_that_names_an_absent_kind_says_what_to_install() -> None:
    host = without_console()
    text = unknown_kind("console", host.operations, host)
    assert text.startswith('no installed plugin offers the operations "console"')
    assert "pip install commutator-console" in text


@pytest.mark.security
async def test_each_route_asks_for_what_it_needs() -> None:
    notes = Notes()
    options: dict[str, Any] = {"host": host_with(notes), "operations": [*chosen()]}
    async with front_door(FakeDispatcher(), gate=gate_of(*PRINCIPALS), **options) as door:

        async def status(method: str, path: str, key: str | None = None) -> int:
            headers = {} if key is None else key_of(key)
            url = door.url + path
            async with door.session.request(method, url, headers=headers) as answer:
                return answer.status

        for method in ("GET", "POST"):
            assert await status(method, "/admin/notes") == 401
            assert await status(method, "/admin/notes", "user") == 403
            assert await status(method, "/admin/notes", "root") == 200
        assert await status("GET", "/notes") == 200
        assert await status("HEAD", "/notes") == 200
        assert await status("HEAD", "/admin/notes", "root") == 405
    assert notes.doors == [OperationsDoor(serves_clients=True, needs_key=True)]
    async with front_door(FakeDispatcher(), **options) as door:
        assert (await door.get("/admin/notes"))[0] == 200, "this machine may look"
        assert (await door.post("/admin/notes", {}))[0] == 403, "and not act"


@pytest.mark.parametrize(
    ("offered", "problem"),
    [
        ((Notes(), Notes()), "POST /admin/notes is claimed by"),
        ((Notes("/health"),), "GET /health is claimed by commutator itself"),
    ],
)
async def test_two_that_claim_a_route_are_refused(offered: tuple[Notes, ...], problem: str) -> None:
    host, operations = host_with(*offered), [*chosen(len(offered))]
    with pytest.raises(ConfigError) as caught:
        async with front_door(FakeDispatcher(), host=host, operations=operations):
            pass
    assert problem in str(caught.value)


@pytest.mark.parametrize(
    ("needs", "path"), [("watch", "/notes"), ("nothing", "/admin/notes"), ("nothing", "notes")]
)
def test_a_route_that_would_not_be_guarded_is_refused(needs: Any, path: str) -> None:
    async def handle(request: web.Request) -> web.Response:
        raise AssertionError(request)

    with pytest.raises(ValueError, match="a path begins with"):
        OperationsRoute(method="GET", path=path, needs=needs, handle=handle)
