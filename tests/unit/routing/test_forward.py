"""Requests that a worker gets as they came: routed, counted and remembered as any other."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import evolve
from tests.unit.routing.test_dispatcher import FakeClient, Setup, request

from commutator.contract.worker import EngineInfo
from commutator.errors import RoutingError
from commutator.routing.forward import RANK_HEADER


class Answer:
    status, content_type = 200, "application/json"

    async def chunks(self) -> AsyncIterator[bytes]:
        yield b"{"
        yield b"}"


class ForwardingClient(FakeClient):
    def __init__(self, address: str, **facts: Any) -> None:
        super().__init__(address)
        self.facts = facts
        self.sent: list[tuple[str, bytes, dict[str, str]]] = []

    async def start(self) -> EngineInfo:
        return evolve(await super().start(), forwards=True, **self.facts)

    @asynccontextmanager
    async def forward(
        self, path: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        self.sent.append((path, body, dict(headers)))
        yield Answer()


async def setup_with(**facts: Any) -> tuple[Setup, ForwardingClient]:
    setup, client = Setup(router="kv"), ForwardingClient("w-1", **facts)
    setup.connector.clients["w-1"] = client
    await setup.up("w-0", "w-1")
    return setup, client


async def answered(setup: Setup, name: str) -> dict[str, Any]:
    async with await setup.dispatcher.forward("m", request(name)) as forward:
        assert setup.active() == 1
        answer = await forward.send("/v1/embeddings", b"{}", {"X-Request-Id": name})
        assert answer.status == 200
        assert b"".join([chunk async for chunk in forward.chunks()]) == b"{}"
        return forward.route.explain()


async def test_only_workers_that_take_such_requests_are_asked() -> None:
    setup, client = await setup_with()
    explained = await answered(setup, "a")
    assert [one["worker_id"] for one in explained["candidates"]] == ["w-1"]
    assert client.sent == [("/v1/embeddings", b"{}", {"X-Request-Id": "a"})]
    assert setup.active() == 0
    await setup.dispatcher.membership.worker_down("w-1", "stopped")
    assert not setup.dispatcher.forwards("m")
    with pytest.raises(RoutingError):
        await setup.dispatcher.forward("m", request("b"))
    await setup.dispatcher.close()


async def test_the_engine_gets_the_rank_that_was_chosen() -> None:
    """A second request with the same prompt goes where the first one went."""
    setup, client = await setup_with(data_parallel_size=2)
    chosen = [(await answered(setup, name))["worker_id"] for name in "abc"]
    assert len(set(chosen)) == 1
    assert {headers[RANK_HEADER] for _, _, headers in client.sent} == {chosen[0].split("@")[1]}
    again = await setup.dispatcher.forward("m", request("d"))
    assert again.route.candidate.overlap.blocks == 1, "what it was sent is guessed to be there"
    async with again:
        pass
    await setup.dispatcher.close()
