"""The live view over HTTP: who may see it, what it shows, what it costs when nobody looks."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, front_door, make_services
from tests.support.principals import gate_of, key_of

from commutator.contract.principal import Principal
from commutator.contract.worker import EngineLoad, WorkerRecord
from commutator.errors import OverloadedError
from commutator.frontend.demand import PlannerLink
from commutator.launcher.ports import reserved_port
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator_console.live import LIVE_PATH, LiveFeed
from commutator_console.page import PAGE_PATHS

PRINCIPALS = (
    Principal(name="root", permissions=frozenset({"admin"})),
    Principal(name="watcher", permissions=frozenset({"metrics", "explain"})),
)
"""Each one's name is its key."""


@pytest.fixture
def folder() -> Iterator[Path]:
    # Paths of Unix sockets are short, and pytest's folders are not.
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


async def status(url: str, **headers: str) -> int:
    async with aiohttp.ClientSession() as session, session.get(url, headers=headers) as answer:
        return answer.status


@asynccontextmanager
async def watching(door: FrontDoor, **headers: str) -> AsyncIterator[aiohttp.ClientResponse]:
    async with door.session.get(door.url + LIVE_PATH, headers=headers) as answer:
        assert answer.status == 200
        yield answer


async def next_snapshot(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    async with asyncio.timeout(20):
        async for line in answer.content:
            if line.startswith(b"data: {") and len(line) > len("data: {}\n"):
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("the stream ended")


async def test_a_request_is_shown_with_its_decision_and_its_end() -> None:
    dispatcher = FakeDispatcher(loads={"fake-0": EngineLoad(waiting=3)})
    async with front_door(dispatcher) as door, watching(door) as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert answer.headers["Cache-Control"] == "no-store"
        before = await next_snapshot(answer)
        assert (before["recent"], before["requests"]["per_s"]) == ([], None)
        await door.chat()
        now = await next_snapshot(answer)
        while not now["recent"]:
            now = await next_snapshot(answer)
        decision = await asked_why(door, now["recent"][0]["request_id"])
        assert await status(f"{door.url}/admin/live/decision?request=none") == 404
    assert (decision["worker_id"], decision["scores"]) == ("fake-0", {"fake-0": {"cost": 1.5}})
    assert (decision["reason"], decision["left_out"]) == ("because it is Tuesday", 0)
    (row,) = now["recent"]
    assert (row["worker_id"], row["reason"]) == ("fake-0", "because it is Tuesday")
    assert (row["state"], row["cached_tokens"], row["generated_tokens"]) == ("done", 2, 3)
    assert now["requests"]["per_s"] > 0
    assert now["requests"]["ttft"]["count"] == 1
    assert (now["models"], now["status"], now["doors_not_shown"]) == ([MODEL], "ready", 0)
    (worker,) = now["workers"]
    assert (worker["worker_id"], worker["load"]["waiting"]) == ("fake-0", 3)


async def asked_why(door: FrontDoor, request_id: str) -> dict[str, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{door.url}/admin/live/decision", params={"request": request_id}) as answer,
    ):
        assert answer.status == 200
        found: dict[str, Any] = await answer.json()
        return found


async def test_a_drain_is_an_event_and_no_lost_worker() -> None:
    dispatcher = FakeDispatcher(addresses={"fake-0": None, "fake-1": None})
    async with front_door(dispatcher) as door, watching(door) as answer:
        await next_snapshot(answer)
        dispatcher.states["fake-1"] = "draining"
        for observer in dispatcher.observers:
            observer.worker_down(cast(WorkerRecord, None), "draining")
        now = await next_snapshot(answer)
        while not now["events"]:
            now = await next_snapshot(answer)
    assert [(one["kind"], one["text"].split()[0]) for one in now["events"]] == [("drain", "fake-1")]


class SilentPlanner:
    """A link to a planner, with what it told last."""

    status: dict[str, Any] | None = None


async def test_workers_that_fail_and_the_planner_are_shown() -> None:
    services = make_services(FakeDispatcher())
    services.unready = [
        UnreadyWorker(
            worker_id="w-1", model=MODEL, kind="k", engine="w", since_unix_s=1.0,
            state=UnreadyState.FAILING, cause="no memory", next_start_unix_s=2.0,
        )
    ]  # fmt: skip
    feed = LiveFeed(services, every_s=0.01)
    services.planner = cast(PlannerLink, link := SilentPlanner())
    async with feed.watch() as snapshots:
        shown = json.loads(await anext(snapshots))
        assert (shown["status"], shown["problems"]) == (
            "degraded", ["worker w-1 is failing: no memory"],
        )  # fmt: skip
        ready, failing = shown["workers"]
        assert failing.keys() == ready.keys()
        assert (failing["state"], failing["cause"]) == ("failing", "no memory")
        assert shown["planner"]["roles"] == []
        assert "kind" not in shown["planner"]
        role = {
            "desired": 2,
            "proposed": 2,
            "ready": 1,
            "starting": 1,
            "draining": 0,
            "reason": "r",
        }
        last = {"time": 5.0, "roles": {"both": role}, "actions": [], "warnings": ["w"]}
        link.status = {
            "kind": "slo", "mode": "act", "acts": True, "interval_s": 5.0, "plans": 1,
            "last": last, "recent": [{"time": 4.0, "text": "+1 both"}],
        }  # fmt: skip
        await anext(snapshots)
        shown = json.loads(await anext(snapshots))["planner"]
        assert shown["roles"] == [{"role": "both"} | role]
        assert (shown["warnings"], shown["recent"][0]["text"]) == (["w"], "+1 both")
        link.status["last"] = None
        await anext(snapshots)
        assert json.loads(await anext(snapshots))["planner"]["roles"] == []


async def test_nothing_is_listened_to_while_nobody_watches() -> None:
    dispatcher = FakeDispatcher()
    services = make_services(dispatcher)
    feed = LiveFeed(services, every_s=0.01, lease_s=0.05)
    assert dispatcher.observers == []
    async with feed.watch() as snapshots:
        await anext(snapshots)
        assert len(dispatcher.observers) == 1
    async with asyncio.timeout(20):
        while dispatcher.observers:  # the lease ends
            await asyncio.sleep(0.01)
    asked = len(dispatcher.asked)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(dispatcher.asked) == asked  # no snapshot is made any more


async def test_watchers_are_bounded_and_one_snapshot_serves_them_all() -> None:
    dispatcher = FakeDispatcher()
    feed = LiveFeed(make_services(dispatcher), every_s=0.01)
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(feed.watch()) for _ in range(16)]
        with pytest.raises(OverloadedError, match="16 others watch"):
            await stack.enter_async_context(feed.watch())
        found = await asyncio.gather(*map(anext, streams))
        assert len(set(found)) == 1
    assert feed.watchers == 0
    async with feed.watch() as snapshots:
        assert json.loads(await anext(snapshots))["recent"] == []


async def test_a_snapshot_that_fails_ends_the_streams_with_its_cause() -> None:
    dispatcher = FakeDispatcher()
    feed = LiveFeed(make_services(dispatcher), every_s=0.01)
    dispatcher.loads = None  # type: ignore[assignment]
    async with feed.watch() as snapshots:
        with pytest.raises(AttributeError):
            await anext(snapshots)
    dispatcher.loads = {}
    async with feed.watch() as snapshots:
        assert await anext(snapshots)


async def test_many_workers_are_asked_in_turn_and_all_are_shown() -> None:
    names = [f"w-{number:04}" for number in range(150)]
    dispatcher = FakeDispatcher(addresses=dict.fromkeys(names))
    dispatcher.loads = {name: EngineLoad(running=1) for name in names}
    feed = LiveFeed(make_services(dispatcher), every_s=0.01)
    async with feed.watch() as snapshots:
        for loads in (64, 128, 150):
            shown = json.loads(await anext(snapshots))["workers"]
            assert [one["worker_id"] for one in shown] == names
            assert sum(one["load"] is not None for one in shown) == loads
    assert [len(names) for names in dispatcher.asked[:3]] == [64, 64, 22]


async def test_every_front_door_shows_the_whole_run(folder: Path) -> None:
    doors = [FakeDispatcher(reason=f"of door {number}") for number in (0, 1)]
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(
                front_door(fake, local_socket=str(folder / f"frontend-{number}.sock"), replicas=3)
            )
            for number, fake in enumerate(doors)
        ]
        answer = await stack.enter_async_context(watching(opened[0]))
        await next_snapshot(answer)
        await opened[1].chat()
        now = await next_snapshot(answer)
        while not now["recent"]:
            now = await next_snapshot(answer)
        assert [one["reason"] for one in now["recent"]] == ["of door 1"]
        assert [one["door"] for one in now["doors"]] == ["frontend-0", "frontend-1"]
        assert now["doors_not_shown"] == 1  # of the three, one has not come up
        decision = await asked_why(opened[0], now["recent"][0]["request_id"])
        assert decision["reason"] == "of door 1", "the other front door knows"


async def test_a_front_door_that_ends_ends_the_streams() -> None:
    async with front_door(FakeDispatcher()) as door, watching(door) as answer:
        await next_snapshot(answer)
        door.stop.set()
        async with asyncio.timeout(20):
            assert b"event: end" in await answer.content.read()


@pytest.mark.security
async def test_without_keys_only_this_machine_may_look() -> None:
    async with front_door(FakeDispatcher()) as door:
        part = f"{door.url}{LIVE_PATH}/door"
        assert await status(part) == 200
        assert await status(part, Host=f"localhost:{door.port}") == 200
        assert await status(part, **{"Sec-Fetch-Site": "same-origin"}) == 200
        for headers in (
            {"Host": "rebound.example"},
            {"Host": f"[::g]:{door.port}"},
            {"Sec-Fetch-Site": "cross-site"},
            {"X-Forwarded-For": "192.0.2.1"},
            {"Via": "1.1 proxy"},
        ):
            assert await status(part, **headers) == 403, headers
            assert await status(door.url + LIVE_PATH, **headers) == 403, headers


@pytest.mark.security
async def test_with_keys_only_the_permission_admin_shows_it() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        gate = gate_of(*PRINCIPALS)
        each: list[dict[str, Any]] = [{}, {"admin": {"port": port}}]
        for options in each:
            async with front_door(FakeDispatcher(), gate=gate, **options) as door:
                url = f"http://127.0.0.1:{port}" if options else door.url
                part = f"{url}{LIVE_PATH}/door"
                assert await status(part) == 401
                assert await status(part, **key_of("watcher")) == 403
                assert await status(f"{url}{LIVE_PATH}", **key_of("watcher")) == 403
                assert await status(part, **key_of("root")) == 200
                async with door.session.get(f"{url}/ui") as page:
                    text = await page.text()
                assert 'data-key="yes"' in text
                assert f'data-chat="{"no" if options else "yes"}"' in text
                if options:
                    assert await status(f"{door.url}{LIVE_PATH}/door", **key_of("root")) == 404
                    assert await status(f"{door.url}/ui") == 404


@pytest.mark.security
async def test_the_page_is_static_and_runs_only_our_scripts() -> None:
    async with front_door(FakeDispatcher(), gate=gate_of(*PRINCIPALS)) as door:
        for path in sorted(PAGE_PATHS - {"/"}):
            async with door.session.get(door.url + path) as answer:
                assert answer.status == 200, path
                policy = answer.headers["Content-Security-Policy"]
                body = await answer.text()
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert answer.headers["X-Frame-Options"] == "DENY"
            without_names = body.replace("http://www.w3.org/2000/svg", "")
            assert "://" not in without_names, path  # nothing is loaded from elsewhere
            assert "innerHTML" not in body
            assert "<script>" not in body
            assert " style=" not in body
        for method in ("POST", "PUT", "DELETE"):
            async with door.session.request(method, f"{door.url}/ui") as answer:
                assert answer.status == 405


async def test_browsers_find_the_page_at_the_root_and_others_a_word() -> None:
    async with front_door(FakeDispatcher()) as door:
        html = {"Accept": "text/html,application/xhtml+xml"}
        async with door.session.get(f"{door.url}/", headers=html) as answer:
            assert (answer.status, answer.url.path) == (200, "/ui")
            assert answer.content_type == "text/html"
        async with door.session.get(f"{door.url}/") as answer:
            assert (answer.status, answer.content_type) == (200, "text/plain")
            assert "/ui" in await answer.text()
        async with door.session.head(f"{door.url}/") as answer:
            assert answer.status == 200
