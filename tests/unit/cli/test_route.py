"""`commutator route explain` against a front door."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from tests.support.front_door import MODEL, TEXT, FakeDispatch, FakeDispatcher, front_door

from commutator.cli.main import main
from commutator.contract.request import GenerateRequest, RequestSummary
from commutator.contract.routing import RouterConfig
from commutator.contract.worker import EventSource
from commutator.routing.load import InFlightLoad
from commutator.routing.prefix_index.indexer import KvIndexer
from commutator.routing.router import ModelRouter
from commutator_balance import LeastLoaded
from commutator_kv_router import KvRouter, KvRouterConfig
from commutator_replay.fleet import virtual_live_worker


async def explain(*arguments: str) -> Result:
    command = ["route", "explain", "--run", *arguments]
    return await asyncio.to_thread(CliRunner().invoke, main, command)


def decision(workers: int) -> dict[str, Any]:
    """A real one: worker w-0 has a request in flight, the others none."""
    load = InFlightLoad()
    load.dispatch("w-0", 320, 16)
    policy = LeastLoaded()
    pool = ModelRouter(policy, None, load, random.Random(1), 16)
    live = [virtual_live_worker(f"w-{number}") for number in range(workers)]
    return pool.route(
        RequestSummary(request_id="r", model=MODEL, prompt_tokens=100, max_tokens=1), (), live
    ).explain()


async def looked_up() -> dict[str, Any]:
    """One of a policy that looks at overlaps.

    Of the prompt's three blocks w-0 tells of two, w-1 of none, and w-2, which tells nothing, was
    sent all of them before.
    """
    cache = KvIndexer(RouterConfig(kind="kv"))
    live = [virtual_live_worker(f"w-{number}") for number in range(3)]
    for worker in live[:2]:
        told = evolve(worker.record.info, kv_events=EventSource(endpoint="tcp://127.0.0.1:9"))
        worker.record = evolve(worker.record, info=told)
    for worker in live:
        await cache.add(worker.record)
    cache.index.store("w-0", [1, 2])
    cache.routed(live[2].record, 0, [1, 2, 3])
    policy = KvRouter(KvRouterConfig(kind="kv"))
    pool = ModelRouter(policy, cache, InFlightLoad(), random.Random(1), 16)
    route = pool.route(
        RequestSummary(request_id="r", model=MODEL, prompt_tokens=50, max_tokens=1), [1, 2, 3], live
    )
    await cache.remove("w-0")  # what comes later does not change what was known
    await cache.close()
    return route.explain()


async def test_every_candidate_with_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDispatch, "explain", lambda _: decision(2))
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        shown = await explain("Once upon a time", "--url", door.url)
        raw = await explain("Once upon a time", "--url", door.url, "--json", "--chat")
    assert shown.exit_code == 0, shown.output
    first, *lines = shown.output.splitlines()
    assert first.startswith("w-1  by least_loaded: least work (0.0 blocks) of 2 workers")
    assert lines[0].startswith("  w-0 ")
    assert "in flight: 1 requests, 320 prefill tokens, 20 blocks" in lines[0]
    assert "cached: not known (least_loaded ignores caches); " in lines[0]
    assert lines[1].strip() == "work_blocks 40.00"
    assert lines[2].startswith("* w-1 ")
    assert json.loads(raw.output) == decision(2)
    assert [request.sampling.max_tokens for request in dispatcher.requests] == [1, 1]


async def test_nothing_is_sent_unless_it_is_asked_for() -> None:
    class Previews(FakeDispatcher):
        previewed: list[GenerateRequest]

        def preview(self, model: str, request: GenerateRequest) -> dict[str, Any]:
            assert model == MODEL
            self.previewed = [request]
            return decision(2)

    dispatcher = Previews()
    async with front_door(dispatcher) as door:
        command = ["route", "explain", "Once upon a time", "--url", door.url, "--json"]
        shown = await asyncio.to_thread(CliRunner().invoke, main, command)
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.output) == decision(2)
    assert dispatcher.requests == []
    assert list(dispatcher.previewed[0].token_ids) == TEXT.encode("Once upon a time")


async def test_nothing_cached_is_not_the_same_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    decision = await looked_up()
    monkeypatch.setattr(FakeDispatch, "explain", lambda _: decision)
    async with front_door(FakeDispatcher()) as door:
        shown = await explain("Once", "--url", door.url)
    assert shown.exit_code == 0, shown.output
    lines = [line for line in shown.output.splitlines() if "cached: " in line]
    assert "w-0 " in lines[0]
    assert "cached: device=2; " in lines[0]
    assert "w-1 " in lines[1]
    assert "cached: nothing; " in lines[1]
    assert "w-2 " in lines[2]
    assert "cached: device=3 (a guess); " in lines[2]
    assert [told["guessed"] for told in decision["candidates"]] == [False, False, True]


async def test_many_candidates_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeDispatch, "explain", lambda _: decision(400))
    async with front_door(FakeDispatcher()) as door:
        shown = await explain("Once", "--url", door.url)
    assert "and 399 more" in shown.output


async def test_one_of_several_models_must_be_named() -> None:
    async with front_door(FakeDispatcher(), {"a": TEXT, "b": TEXT}) as door:
        shown = await explain("Once", "--url", door.url)
        assert shown.exit_code == 1
        assert "--model" in shown.output
        assert "one of: a, b" in shown.output


async def test_nothing_listens() -> None:
    shown = await explain("Once", "--url", "http://127.0.0.1:9")
    assert shown.exit_code == 1
    assert "is `commutator serve` running?" in shown.output


async def test_the_url_may_be_the_one_that_clients_are_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeDispatch, "explain", lambda _: decision(2))
    async with front_door(FakeDispatcher()) as door:
        shown = await explain("Once", "--url", f"{door.url}/v1/")
    assert shown.exit_code == 0, shown.output


@pytest.mark.parametrize("status", ["200 OK", "404 Not Found"])
async def test_another_server_listens(status: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.0 {status}\r\nContent-Type: text/html\r\n\r\n<html>".encode())
        finally:
            writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        shown = await explain("Once", "--url", f"http://127.0.0.1:{port}")
    assert shown.exit_code == 1
    assert "front door" in shown.output
    assert isinstance(shown.exception, SystemExit)


async def test_what_is_no_url_is_named() -> None:
    shown = await explain("Once", "--url", "localhost:8000")
    assert shown.exit_code == 2
    assert "expected http://HOST:PORT, got localhost:8000" in shown.output


async def test_prefill_elsewhere_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = {
        "separate": True,
        "reason": "long prompt",
        "terms": {"uncached_tokens": 1200.0},
        "prefill_worker_id": "p-1",
        "outcome": "handed over",
        "failed": [{"prefill_worker": "p-0", "reason": "connection lost"}],
    }
    monkeypatch.setattr(FakeDispatch, "explain", lambda _: decision(2) | {"disaggregation": apart})
    async with front_door(FakeDispatcher()) as door:
        shown = await explain("Once", "--url", door.url)
    assert shown.exit_code == 0, shown.output
    assert shown.output.splitlines()[1:4] == [
        "  prefill at p-1: long prompt; handed over",
        "    uncached_tokens 1200",
        "    p-0 failed: connection lost",
    ]
