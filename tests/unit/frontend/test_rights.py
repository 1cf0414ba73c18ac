"""What a principal may do at the front door, and what it cannot see or reach."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientSession, UnixConnector
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import (
    MODEL,
    TEXT,
    FakeDispatcher,
    FrontDoor,
    answer,
    front_door,
)
from tests.support.principals import gate_of, key_of

from commutator.auth.rights import allowed_priority, salted
from commutator.contract.principal import (
    Limits,
    Principal,
    PrincipalConfig,
)
from commutator.errors import RequestError
from commutator.launcher.ports import reserved_port

pytestmark = pytest.mark.security

ALICE = PrincipalConfig().principal("alice")
BOB = PrincipalConfig(models=("b",)).principal("bob")
SMALL = PrincipalConfig(limits=Limits(answers=2, max_model_len=64)).principal("small")
SCRAPER = PrincipalConfig(permissions=("metrics",)).principal("scraper")
ADMIN = PrincipalConfig(permissions=("admin",), priority=None).principal("admin")
GUEST = PrincipalConfig(shares_cache_with="alice").principal("guest")
EVERYONE = (ALICE, BOB, SMALL, SCRAPER, ADMIN, GUEST)


@asynccontextmanager
async def door_for(
    principal: Principal, dispatcher: FakeDispatcher | None = None, **more: Any
) -> AsyncIterator[FrontDoor]:
    gate = gate_of(*EVERYONE)
    async with front_door(dispatcher or FakeDispatcher(), gate=gate, **more) as door:
        door.session.headers.update(key_of(principal.name))
        yield door


async def test_models_of_others_do_not_exist() -> None:
    async with door_for(BOB, models={"a": TEXT, "b": TEXT}) as door:
        _, listed = await door.get("/v1/models")
        assert [card["id"] for card in listed["data"]] == ["b"]
        assert (await door.chat(model="b"))[0] == 200
        for path, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/embeddings", {"input": "x"}),
            ("/tokenize", {"prompt": "x"}),
            ("/detokenize", {"tokens": [1]}),
        ):
            refused = await door.post(path, {"model": "a", **body})
            unknown = await door.post(path, {"model": "z", **body})
            assert refused[0] == unknown[0] == 404
            told, expected = refused[1]["error"], unknown[1]["error"]
            assert told["message"] == expected["message"].replace("'z'", "'a'")
            assert told["code"] == "model_not_found"
        assert (await door.get("/v1/models/a"))[0] == 404
        _, document = await door.get("/openapi.json")
        schema = document["components"]["schemas"]["ChatRequest"]
        assert schema["properties"]["model"]["enum"] == ["b", None]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_the_salt_is_the_principals(path: str) -> None:
    dispatcher = FakeDispatcher(block_size=16)
    asked = {"prompt": "x " * 40, "messages": [{"role": "user", "content": "x " * 40}]}
    asked.pop("prompt" if "chat" in path else "messages")
    async with door_for(ALICE, dispatcher) as door:
        for own in (None, "mine", "principal/bob", "\x1f"):
            assert (await door.post(path, {**asked, "cache_salt": own}))[0] == 200
        door.session.headers["Authorization"] = "Bearer guest"
        assert (await door.post(path, asked))[0] == 200
        door.session.headers["Authorization"] = "Bearer small"
        await door.post(path, asked)
    assert (
        [request.cache_salt for request in dispatcher.requests]
        == [
            "principal/alice",
            "principal/alice\x1fmine",
            "principal/alice\x1fprincipal/bob",
            "principal/alice\x1f\x1f",
            "principal/alice",  # shared on purpose
            "principal/small",
        ][: len(dispatcher.requests)]
    )
    hashes = [tuple(found or ()) for found in dispatcher.hashes]
    assert hashes[0] == hashes[4]
    assert len({*hashes}) == len(hashes) - 1


@given(
    st.sampled_from(EVERYONE),
    st.sampled_from(EVERYONE),
    st.none() | st.text(),
    st.none() | st.text(),
)
def test_no_salts_meet_that_no_one_shares(
    one: Principal, other: Principal, own: str | None, others: str | None
) -> None:
    same = salted(one, own) == salted(other, others)
    assert same == (one.cache_salt == other.cache_salt and own == others)


async def test_prompts_of_others_do_not_help_to_tokenize() -> None:
    dispatcher, text = FakeDispatcher(), "Some words that were here before. " * 60
    async with door_for(ALICE, dispatcher) as door:

        async def known_after(name: str) -> float:
            door.session.headers["Authorization"] = f"Bearer {name}"
            assert (await door.complete(prompt=text, max_tokens=1))[0] == 200
            counter = door.services.metrics.prompt_cache_hits.labels(MODEL)
            return float(counter._value.get())

        assert await known_after("alice") == 0
        assert await known_after("admin") == 0
        assert await known_after("alice") > 0


async def test_priorities_outside_the_range_are_refused() -> None:
    dispatcher = FakeDispatcher()
    async with door_for(ALICE, dispatcher) as door:
        status, body = await door.chat(priority=-1000)
        assert (status, body["error"]["param"]) == (400, "priority")
        assert "expected 0 to 2147483647, the range of alice" in body["error"]["message"]
        assert (await door.complete(priority=-1))[0] == 400
        assert (await door.complete(priority=7))[0] == 200
        door.session.headers["Authorization"] = "Bearer admin"
        assert (await door.complete(priority=-1000))[0] == 200
    assert [request.priority for request in dispatcher.requests] == [7, -1000]


@given(st.integers(-9, 9), st.integers(-9, 9), st.none() | st.integers(-20, 20))
def test_a_priority_is_in_its_range_or_refused(low: int, high: int, asked: int | None) -> None:
    low, high = sorted((low, high))
    principal = PrincipalConfig(priority=(low, high)).principal("p")
    try:
        got = allowed_priority(principal, asked)
    except RequestError:
        assert asked is not None
        assert not low <= asked <= high
    else:
        assert low <= got <= high
        assert asked in (None, got)


async def test_answers_and_context_have_limits() -> None:
    dispatcher = FakeDispatcher(answer("a b c"))
    async with door_for(SMALL, dispatcher) as door:
        assert (await door.complete(n=2))[0] == 200
        status, body = await door.complete(n=128)
        assert (status, body["error"]["code"]) == (400, "too_many_answers")
        assert (await door.complete(prompt=["a", "b"], n=2))[0] == 400
        assert (await door.complete(prompt="word " * 100))[0] == 400
        assert (await door.complete(max_tokens=64))[0] == 400
        _, listed = await door.get("/v1/models")
        assert listed["data"][0]["max_model_len"] == 64
        assert (await door.chat())[0] == 200
    assert (
        dispatcher.requests[-1].sampling.max_tokens + len(dispatcher.requests[-1].token_ids) == 64
    )


async def test_permissions() -> None:
    marks: dict[str, Any] = {"cache_control": {"type": "persistent"}}
    part = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]
    explain = {"X-Commutator-Explain": "1"}
    async with door_for(ALICE) as door:
        for body in (marks, {"messages": [{"role": "user", "content": part}]}):
            status, told = await door.chat(**body)
            assert (status, told["error"]["code"]) == (403, "permission_denied")
            assert '"pin"' in told["error"]["message"]
        url, plain = f"{door.url}/v1/completions", {"model": MODEL, "prompt": "x"}
        async with door.session.post(url, json=plain) as response:
            assert response.status == 200
            assert "X-Commutator-Worker" not in response.headers
        async with door.session.post(url, json=plain, headers=explain) as response:
            assert response.status == 403
            assert (await response.json())["error"]["type"] == "permission_error"
        for path in ("/metrics", "/health"):
            assert (await door.get(path))[0] == 403
        door.session.headers["Authorization"] = "Bearer admin"
        assert (await door.chat(**marks))[0] == 200
        async with door.session.post(url, json=plain, headers=explain) as response:
            assert "X-Commutator-Worker" in response.headers
            assert "X-Commutator-Decision" in response.headers
        door.session.headers["Authorization"] = "Bearer scraper"
        assert (await door.get("/health"))[0] == 200
        async with door.session.get(f"{door.url}/metrics") as response:
            assert response.status == 200


async def test_operations_on_an_address_of_their_own() -> None:
    with reserved_port("127.0.0.1", 0) as port:
        await _try_operations({"port": port})


async def _try_operations(admin: dict[str, Any]) -> None:
    async with door_for(ADMIN, admin=admin) as door:
        for path in ("/metrics", "/health"):
            assert (await door.get(path))[0] == 404
        _, document = await door.get("/openapi.json")
        assert not {"/metrics", "/health"} & document["paths"].keys()
        base = f"http://127.0.0.1:{admin['port']}"
        async with ClientSession() as anyone:
            for path in ("/metrics", "/health", "/live", "/ready"):
                async with anyone.get(base + path) as response:
                    assert response.status == 200
            for path in ("/v1/models", "/openapi.json", "/tokenize"):
                async with anyone.get(base + path) as response:
                    assert response.status == 404
            for path in ("/live", "/ready"):
                async with anyone.get(door.url + path) as response:
                    assert await response.json() == {"status": "ok"}


async def test_the_supervisor_needs_no_key(tmp_path: Any) -> None:
    path = str(tmp_path / "s")
    async with (
        door_for(ALICE, local_socket=path),
        ClientSession(connector=UnixConnector(path)) as session,
    ):
        for asked in ("/live", "/ready", "/health", "/metrics", "/v1/models"):
            async with session.get(f"http://localhost{asked}") as response:
                assert response.status == 200
