"""The Responses API over WebSockets, as Codex speaks it: a connection's memory, limits, its end."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientWebSocketResponse, WSMsgType, WSServerHandshakeError
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, front_door

from commutator.auth.gate import Gate
from commutator.contract.principal import Authenticator, Credentials, Principal
from commutator.contract.response_store import ResponseStoreConfig
from commutator.errors import EngineError
from commutator_responses import handlers
from commutator_responses.protocol import ResponsesConfig

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PROTOCOLS = (ResponsesConfig(kind="responses", store=ResponseStoreConfig(kind="none")),)


class Keys(Authenticator):
    """Bearer tokens are names of principals, unless they are revoked."""

    def __init__(self) -> None:
        self.revoked: set[str] = set()

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        name = credentials.bearer
        if name is None or name in self.revoked:
            return None
        return Principal(name=name, permissions=frozenset({"metrics"}))


@asynccontextmanager
async def connected(
    dispatcher: FakeDispatcher | None = None, keys: Keys | None = None, **options: Any
) -> AsyncIterator[tuple[FrontDoor, ClientWebSocketResponse]]:
    gate = None if keys is None else Gate([("keys", keys)])
    options = {"protocols": PROTOCOLS, **options}
    headers = {} if keys is None else {"Authorization": "Bearer alice"}
    async with front_door(dispatcher or FakeDispatcher(), gate=gate, **options) as door:
        url = f"{door.url}/v1/responses"
        async with door.session.ws_connect(url, headers=headers) as socket:
            yield door, socket


async def ask(socket: ClientWebSocketResponse, **fields: Any) -> list[dict[str, Any]]:
    """The events of one response."""
    await socket.send_json({"type": "response.create", "model": MODEL, "store": False, **fields})
    return await events_of(socket)


async def events_of(socket: ClientWebSocketResponse) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while not found or found[-1]["type"] not in _LAST:
        message = await socket.receive(10)
        assert message.type is WSMsgType.TEXT, message
        event = json.loads(message.data)
        if event["type"] != "error":
            assert event["sequence_number"] == len(found)
            EVENT.validate_python(event)
        found.append(event)
    return found


_LAST = ("response.completed", "response.incomplete", "response.failed", "error")


async def test_a_connection_remembers_its_last_response_though_it_is_not_stored() -> None:
    async with connected() as (door, socket):
        first = await ask(socket, generate=False, input="Warm up.", instructions="Be brief.")
        assert [event["type"] for event in first] == ["response.created", "response.completed"]
        warm = first[-1]["response"]
        assert (warm["output"], warm["status"]) == ([], "completed")
        assert not door.dispatcher.requests
        second = await ask(socket, previous_response_id=warm["id"], input="Hi")
        assert second[-1]["response"]["output"][0]["content"][0]["text"] == "Hello there!"
        assert second[-1]["response"]["previous_response_id"] == warm["id"]
        third = await ask(
            socket, previous_response_id=second[-1]["response"]["id"], input="More", stream=True
        )
        prompts = [
            door.services.models[MODEL].decode(one.token_ids) for one in door.dispatcher.requests
        ]
        assert [text in prompts[1] for text in ("Warm up.", "Hello there!", "More")] == [True] * 3
        lost = await ask(socket, previous_response_id=warm["id"], input="?")
        assert lost[-1]["error"]["code"] == "unsupported_parameter"  # nothing is stored here
        again = await ask(
            socket, previous_response_id=third[-1]["response"]["id"], input="Still there?"
        )
        assert again[-1]["type"] == "response.completed"


async def test_a_conversation_that_is_too_long_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "_MAX_REMEMBERED_BYTES", 8000)
    async with connected() as (_, socket):
        name = None
        for _ in range(9):
            (*_, last) = await ask(socket, input="x" * 400, previous_response_id=name)
            if last["type"] == "error":
                break
            name = last["response"]["id"]
        assert last["error"]["param"] == "previous_response_id"
        assert (await ask(socket, input="Hi"))[-1]["type"] == "response.completed"


@pytest.mark.security
async def test_another_connection_does_not_know_it() -> None:
    stores = (ResponsesConfig(kind="responses"),)
    async with connected(protocols=stores) as (door, socket):
        (*_, last) = await ask(socket, input="Hi")
        async with door.session.ws_connect(f"{door.url}/v1/responses") as other:
            (said,) = await ask(other, previous_response_id=last["response"]["id"], input="?")
        assert (said["status"], said["error"]["code"]) == (404, "response_not_found")
        (*_, kept) = await ask(socket, input="Hi", store=True)
        async with door.session.ws_connect(f"{door.url}/v1/responses") as other:
            (*_, said) = await ask(other, previous_response_id=kept["response"]["id"], input="?")
        assert said["type"] == "response.completed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"type": "session.update"}, "type"),
        ({"background": True}, "background"),
        ({"generate": "no"}, "generate"),
        ({"input": []}, "input"),
    ],
)
async def test_a_mistake_is_said_and_the_connection_goes_on(
    fields: dict[str, Any], param: str
) -> None:
    async with connected() as (_, socket):
        (said,) = await ask(socket, **{"input": "Hi", **fields})
        assert (said["type"], said["status"], said["error"]["param"]) == ("error", 400, param)
        await socket.send_json({"type": "response.processed", "response_id": "resp_1"})
        assert (await ask(socket, input="Hi"))[-1]["type"] == "response.completed"


async def test_what_fails_on_the_way_is_the_last_event() -> None:
    def broken(_: object) -> list[Any]:
        return [EngineError("it broke")]

    async with connected(FakeDispatcher(script=broken)) as (_, socket):
        (*_, last) = await ask(socket, input="Hi")
        assert last["type"] in ("error", "response.failed")
    refused = FakeDispatcher(refuse=EngineError("no"))
    async with connected(refused) as (_, socket):
        (said,) = await ask(socket, input="Hi")
        assert (said["type"], said["status"]) == ("error", 500)


@pytest.mark.security
async def test_each_message_has_an_account_and_a_principal_of_its_own() -> None:
    keys = Keys()
    async with connected(keys=keys) as (door, socket):
        for _ in range(2):
            (*_, last) = await ask(socket, input="Hi")
            assert last["type"] == "response.completed"
        assert [caller.principal for caller in door.dispatcher.callers] == ["alice", "alice"]
        headers = {"Authorization": "Bearer alice"}
        async with door.session.get(f"{door.url}/metrics", headers=headers) as answer:
            scraped = await answer.text()
        (counted,) = re.findall(
            r'^commutator_principal_output_tokens_total\{principal="alice"\} (\S+)$',
            scraped,
            re.MULTILINE,
        )
        assert float(counted) == 2 * last["response"]["usage"]["output_tokens"]
        keys.revoked.add("alice")
        (said,) = await ask(socket, input="Hi")
        assert (said["type"], said["status"]) == ("error", 401)
        assert (await socket.receive(10)).type is WSMsgType.CLOSE
        assert socket.close_code == 1008


@pytest.mark.security
async def test_who_may_not_call_opens_no_connection() -> None:
    keys = Keys()
    async with connected(keys=keys, max_websockets=1) as (door, _):
        url = f"{door.url}/v1/responses"
        mine = {"Authorization": "Bearer alice"}
        for headers, status in (
            ({}, 401),
            ({**mine, "Origin": "https://evil.example"}, 403),
            (mine, 503),
        ):
            with pytest.raises(WSServerHandshakeError) as caught:
                await door.session.ws_connect(url, headers=headers)
            assert caught.value.status == status
        async with door.session.get(url, headers=mine) as answer:
            assert answer.status == 426
            assert "POST" in (await answer.json())["error"]["message"]


@pytest.mark.security
async def test_what_is_too_large_or_no_text_or_too_much_ends_the_connection() -> None:
    async def ends(door: FrontDoor, *messages: str | bytes) -> int | None:
        async with door.session.ws_connect(f"{door.url}/v1/responses") as socket:
            for message in messages:
                if isinstance(message, str):
                    await socket.send_str(message)
                else:
                    await socket.send_bytes(message)
            while (await socket.receive(10)).type is WSMsgType.TEXT:
                pass
            return socket.close_code

    slow = FakeDispatcher(delay_s=0.2)
    async with connected(slow, max_body_bytes=1000) as (door, _):
        assert await ends(door, "x" * 1001) == 1009
        assert await ends(door, b"{}") == 1003
        wanted = json.dumps({"type": "response.create", "model": MODEL, "input": "Hi"})
        assert await ends(door, *[wanted] * 8) == 1008
        while door.dispatcher.open:  # what was being made ends with its client
            await asyncio.sleep(0.01)


async def test_an_idle_connection_is_closed_and_a_client_that_leaves_is_noticed() -> None:
    slow = FakeDispatcher(delay_s=0.2)
    async with connected(slow, websocket_idle_s=0.5) as (door, socket):
        assert (await socket.receive(10)).type is WSMsgType.CLOSE
        assert socket.close_code == 1000
        async with door.session.ws_connect(f"{door.url}/v1/responses") as other:
            message = {"type": "response.create", "model": MODEL, "input": "Hi"}
            await other.send_json(message)
            await other.receive(10)
            assert door.dispatcher.open == 1
        while door.dispatcher.open:
            await asyncio.sleep(0.01)


async def test_a_connection_that_ends_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "commutator.frontend.request.call")
    async with connected() as (door, socket):
        await ask(socket, input="Hi")
        await socket.close()
        async with door.session.ws_connect(f"{door.url}/v1/responses") as other:
            other._writer.transport.abort()
    said = [record.getMessage().partition(" id=")[0] for record in caplog.records]
    assert said == ["/v1/responses 200", "/v1/responses 101", "/v1/responses 101"]


async def test_a_door_that_ends_says_so() -> None:
    async with connected() as (door, socket):
        door.stop.set()
        message = await socket.receive(10)
        assert message.type is WSMsgType.CLOSE
        assert socket.close_code == 1001
