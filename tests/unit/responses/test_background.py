"""Responses in the background: they outlive their clients, and end however their door ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door

from commutator.contract.answer import Failure
from commutator.contract.response_store import ResponseStore, StoredResponse
from commutator.errors import EngineUnavailableError
from commutator_responses import background
from commutator_responses.background import Background
from commutator_responses.memory import MemoryStore
from commutator_responses.protocol import ResponsesConfig

SLOW_S = 0.05


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@asynccontextmanager
async def served(
    dispatcher: FakeDispatcher | None = None, lease_s: float = 30.0, **options: Any
) -> AsyncIterator[FrontDoor]:
    protocols = (ResponsesConfig(kind="responses", background_lease_s=lease_s),)
    found = dispatcher or FakeDispatcher()
    async with front_door(found, protocols=protocols, **options) as door:
        yield door


async def call(door: FrontDoor, method: str, path: str, **body: Any) -> tuple[int, Any]:
    data = json.dumps(body) if body else None
    headers = {"Content-Type": "application/json"} if body else {}
    async with door.session.request(
        method, f"{door.url}/v1/responses{path}", data=data, headers=headers
    ) as said:
        return said.status, json.loads(await said.read())


async def create(door: FrontDoor, **fields: Any) -> Any:
    wanted = {"model": MODEL, "input": "Hi", "background": True, **fields}
    status, said = await call(door, "POST", "", **wanted)
    assert status == 200, said
    return said


async def until(
    door: FrontDoor, name: str, is_true: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            _, said = await call(door, "GET", f"/{name}")
            if is_true(said):
                return dict(said)
            await asyncio.sleep(0.02)


async def until_idle(door: FrontDoor) -> None:
    while door.dispatcher.open:
        await asyncio.sleep(0.01)


async def test_it_is_queued_made_and_fetched_and_can_be_continued() -> None:
    async with served(FakeDispatcher(delay_s=SLOW_S)) as door:
        queued = await create(door)
        assert (queued["status"], queued["background"], queued["output"]) == ("queued", True, [])
        name = queued["id"]
        status, early = await call(
            door, "POST", "", model=MODEL, input="?", previous_response_id=name
        )
        assert (status, early["error"]["param"]) == (400, "previous_response_id")
        await until(door, name, lambda said: said["status"] == "in_progress")
        done = await until(door, name, lambda said: said["status"] == "completed")
        assert done["output"][0]["content"][0]["text"] == "Hello there!"
        assert done["usage"]["output_tokens"] > 1
        status, _ = await call(door, "POST", "", model=MODEL, input="?", previous_response_id=name)
        assert status == 200
        status, same = await call(door, "POST", f"/{name}/cancel")
        assert (status, same) == (200, done)


async def test_its_client_may_leave_and_come_back_for_the_rest_of_its_events() -> None:
    async with served(FakeDispatcher(delay_s=SLOW_S)) as door:
        wanted = {"model": MODEL, "input": "Hi", "background": True, "stream": True}
        async with door.session.post(f"{door.url}/v1/responses", json=wanted) as said:
            first = await said.content.readuntil(b"\n\n")
            created = json.loads(first.split(b"data: ")[1])
            assert created["type"] == "response.created"
        name = created["response"]["id"]
        url = f"{door.url}/v1/responses/{name}?stream=true"
        async with door.session.get(url) as said:
            whole = await said.read()
        assert whole.startswith(first)
        assert whole.endswith(b"data: [DONE]\n\n")
        events = whole.split(b"\n\n")[:-2]
        numbers = [json.loads(one.split(b"data: ")[1])["sequence_number"] for one in events]
        assert numbers == [*range(len(events))]
        assert (await until(door, name, lambda _: True))["status"] == "completed"
        for after in (0, 3, len(events) - 1):
            async with door.session.get(f"{url}&starting_after={after}") as said:
                rest = await said.read()
            assert rest == b"\n\n".join([*events[after + 1 :], b"data: [DONE]\n\n"])
        for query in ("?stream=true&starting_after=x", "?starting_after=1"):
            status, wrong = await call(door, "GET", f"/{name}{query}")
            assert (status, wrong["error"]["param"]) == (400, "starting_after")
        status, plain = await call(door, "POST", "", model=MODEL, input="Hi")
        status, refused = await call(door, "GET", f"/{plain['id']}?stream=true")
        assert (status, refused["error"]["code"]) == (400, "unsupported_parameter")


async def test_it_is_cancelled_and_makes_nothing_more() -> None:
    async with served(FakeDispatcher(delay_s=0.2)) as door:
        name = (await create(door))["id"]
        await until(door, name, lambda said: said["status"] == "in_progress")
        status, said = await call(door, "POST", f"/{name}/cancel")
        assert (status, said["status"]) == (200, "cancelled")
        await until_idle(door)
        taken = door.dispatcher.taken
        assert (await until(door, name, lambda _: True))["status"] == "cancelled"
        name = (await create(door))["id"]
        status, _ = await call(door, "DELETE", f"/{name}")
        await until_idle(door)
        assert door.dispatcher.taken <= taken + 2
        status, said = await call(door, "POST", "", model=MODEL, input="Hi")
        status, refused = await call(door, "POST", f"/{said['id']}/cancel")
        assert (status, refused["error"]["param"]) == (400, "id")


async def test_what_fails_says_so() -> None:
    def lost(_: object) -> list[Any]:
        return [*answer("Half")(door.dispatcher.requests[-1])[:1], EngineUnavailableError("gone")]

    async with served(FakeDispatcher(script=lost)) as door:
        name = (await create(door))["id"]
        failed = await until(door, name, lambda said: said["status"] == "failed")
        assert failed["error"]["code"] == "server_error"
        assert "worker was lost" in failed["error"]["message"]
        async with door.session.get(f"{door.url}/v1/responses/{name}?stream=true") as said:
            events = (await said.read()).decode()
        assert "response.failed" in events
        _, said = await call(door, "POST", "", model=MODEL, input="x" * 90_000, background=True)
        failed = await until(door, said["id"], lambda said: said["status"] == "failed")
        assert "tokens" in failed["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "status"),
    [({"store": False}, 400), ({"model": "other"}, 404), ({"temperature": 9}, 400)],
)
async def test_what_cannot_be_is_refused_at_once(fields: dict[str, Any], status: int) -> None:
    async with served() as door:
        found, said = await call(
            door, "POST", "", **{"model": MODEL, "input": "Hi", "background": True, **fields}
        )
        assert found == status, said


async def test_a_door_that_ends_leaves_nothing_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[str, StoredResponse] = {}

    class Noted(MemoryStore):
        async def replace(self, stored: StoredResponse, maker: str) -> bool:
            kept[stored.id] = stored
            return await super().replace(stored, maker)

    store = Noted(1 << 20, 60)
    monkeypatch.setattr("commutator_responses.memory.MemoryStore", lambda *_: store)
    async with served(FakeDispatcher(delay_s=0.5), drain_timeout_s=0.1) as door:
        name = (await create(door))["id"]
        await until(door, name, lambda said: said["status"] == "in_progress")
    last = kept[name]
    assert last.maker is None
    assert json.loads(last.response)["status"] == "failed"


async def test_who_finds_it_after_its_lease_says_that_it_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after the power cut of the host that made it."""
    store = MemoryStore(1 << 20, 60)
    monkeypatch.setattr("commutator_responses.memory.MemoryStore", lambda *_: store)
    response = {"id": "resp_1", "status": "in_progress", "background": True, "output": []}
    orphan = StoredResponse(
        id="resp_1",
        owner="anonymous",
        previous=None,
        session=None,
        input=b"[]",
        response=json.dumps(response).encode(),
        maker="m",
        until_unix_s=1.0,
    )
    async with served() as door:
        for path in ("/resp_1", "/resp_1/input_items"):
            await store.put(orphan)
            status, said = await call(door, "GET", path)
            assert status == 200, said
            (found,) = await store.history("anonymous", "resp_1")
            assert found.maker is None
            assert json.loads(found.response)["status"] == "failed"
            assert json.loads(found.response)["error"]["code"] == "server_error"


class Away(MemoryStore):
    """Cannot be reached now and then, and has been told by another that something is over."""

    is_away = False

    async def replace(self, stored: StoredResponse, maker: str) -> bool:
        if self.is_away:
            raise ResponseStore.unavailable()
        return await super().replace(stored, maker)


async def test_the_end_waits_for_a_store_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Away(1 << 20, 60)
    monkeypatch.setattr(background, "_RETRY_S", 0.01)
    monkeypatch.setattr("commutator_responses.memory.MemoryStore", lambda *_: store)
    async with served(FakeDispatcher(delay_s=SLOW_S)) as door:
        name = (await create(door))["id"]
        await until(door, name, lambda said: said["status"] == "in_progress")
        store.is_away = True
        await until_idle(door)
        _, said = await call(door, "GET", f"/{name}")
        assert said["status"] == "in_progress"
        store.is_away = False
        await until(door, name, lambda said: said["status"] == "completed")


async def test_another_door_that_cancels_it_ends_it_here(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore(1 << 20, 60)
    monkeypatch.setattr("commutator_responses.memory.MemoryStore", lambda *_: store)
    async with served(FakeDispatcher(delay_s=0.3), lease_s=0.3) as door:
        name = (await create(door))["id"]
        await until(door, name, lambda said: said["status"] == "in_progress")
        (found,) = await store.history("anonymous", name)
        elsewhere = Background(store, 30.0)
        assert await elsewhere.cancel(found) is not None
        assert await elsewhere.cancel(found) is None
        await until_idle(door)
        assert (await until(door, name, lambda _: True))["status"] == "cancelled"


async def test_what_cannot_be_kept_is_not_passed_off_as_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(MemoryStore):
        async def put(self, stored: StoredResponse) -> None:
            raise self.unavailable()

    monkeypatch.setattr("commutator_responses.memory.MemoryStore", lambda *_: Full(1 << 20, 60))
    async with served() as door:
        status, said = await call(door, "POST", "", model=MODEL, input="Hi")
        assert (status, said["error"]["code"]) == (503, "store_unavailable")
        status, said = await call(door, "POST", "", model=MODEL, input="Hi", background=True)
        assert (status, said["error"]["code"]) == (503, "store_unavailable")
        wanted = {"model": MODEL, "input": "Hi", "stream": True}
        async with door.session.post(f"{door.url}/v1/responses", json=wanted) as answered:
            blocks = (await answered.read()).split(b"\n\n")[:-2]
        events = [json.loads(one.split(b"data: ")[1]) for one in blocks]
        assert [one["sequence_number"] for one in events] == [*range(len(events))]
        assert [one["type"] for one in events[-2:]] == [
            "response.output_item.done",
            "response.failed",
        ]
        last = events[-1]["response"]
        assert "store: false" in last["error"]["message"]
        assert last["output"] == [events[-2]["item"]]
        status, said = await call(door, "POST", "", model=MODEL, input="Hi", store=False)
        assert (status, said["store"]) == (200, False)


@given(st.lists(st.lists(st.binary(min_size=1, max_size=5), max_size=3), max_size=6))
def test_events_come_by_their_numbers(pieces: list[list[bytes]]) -> None:
    texts = [[b"data: " + one.hex().encode() for one in piece] for piece in pieces]
    events = background._Events()
    for piece in texts:
        events.add(b"".join(b"%b\n\n" % one for one in piece))
    events.end()
    flat = [one for piece in texts for one in piece]

    async def rest(number: int) -> bytes:
        return await events.after(number)

    for number in range(-1, len(flat)):
        said = asyncio.run(rest(number))
        assert said == b"".join(b"%b\n\n" % one for one in flat[number + 1 :])
    events.lose()
    assert asyncio.run(rest(-1)) == b""


def test_a_failure_of_the_store_is_one_of_http() -> None:
    failure = ResponseStore.unavailable()
    assert isinstance(failure, Failure)
    assert failure.headers["Retry-After"] == "1"
