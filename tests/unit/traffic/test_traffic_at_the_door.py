"""Aliases, shares and fall-backs through every protocol of the HTTP door."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from attrs import define, field
from tests.support.front_door import (
    TEXT,
    FakeDispatch,
    FakeDispatcher,
    FrontDoor,
    answer,
    engine_info,
    front_door,
)
from tests.support.principals import gate_of, key_of

from commutator import FinishReason, TokenDelta
from commutator.contract.principal import Principal
from commutator.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    RoutingError,
)
from commutator_anthropic.protocol import AnthropicConfig
from commutator_kserve.protocol import KserveConfig
from commutator_openai.protocol import OpenAiConfig
from commutator_responses.protocol import ResponsesConfig
from commutator_traffic.config import AliasConfig, FallBackConfig, TableConfig
from commutator_traffic.table import Table

MODELS = ("v1", "v2", "small")
MESSAGES = [{"role": "user", "content": "Hi"}]


@define
class Versions(FakeDispatcher):
    """Workers of several models, of which some fail."""

    fails: dict[str, Exception] = field(factory=dict)
    """By model, what ``dispatch`` raises."""
    dispatched: list[str] = field(factory=list)
    lengths: dict[str, int] = field(factory=dict)

    async def dispatch(self, model: str, *given: Any, **more: Any) -> FakeDispatch:
        self.dispatched.append(model)
        if (error := self.fails.get(model)) is not None:
            raise error
        return await FakeDispatcher.dispatch(self, model, *given, **more)

    def max_model_len(self, model: str) -> int | None:
        return self.lengths.get(model)

    def models_ready(self) -> dict[str, bool]:
        return {name: name not in self.fails for name in MODELS}


PROTOCOLS = (
    OpenAiConfig(kind="openai"),
    AnthropicConfig(kind="anthropic"),
    ResponsesConfig(kind="responses"),
    KserveConfig(kind="kserve"),
)
TABLE = {
    "default": AliasConfig(
        models={"v1": 1},
        fall_back=(
            FallBackConfig(model="v2", when=("no_worker", "overload", "error")),
            FallBackConfig(model="small"),
        ),
    ),
    "mixed": AliasConfig(models={"v1": 50, "v2": 50}),
    "v2": AliasConfig(models={"small": 1}),
}


@asynccontextmanager
async def doors(
    dispatcher: Versions, *principals: Principal, aliases: dict[str, AliasConfig] = TABLE
) -> AsyncIterator[FrontDoor]:
    gate = gate_of(*principals) if principals else None
    texts = dict.fromkeys(MODELS, TEXT)
    async with front_door(dispatcher, texts, protocols=PROTOCOLS, gate=gate) as door:
        door.services.traffic = Table(TableConfig(aliases=aliases))
        yield door


def chat(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    return "/v1/chat/completions", {"model": model, "messages": MESSAGES}, ("model",)


def completion(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    return "/v1/completions", {"model": model, "prompt": "Hi"}, ("model",)


def responses(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    return "/v1/responses", {"model": model, "input": "Hi"}, ("model",)


def message(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 20}
    return "/v1/messages", body, ("model",)


def inference(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Hi"]}
    return f"/v2/models/{model}/infer", {"inputs": [tensor]}, ("model_name",)


def embedding(model: str | None) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    return "/v1/embeddings", {"model": model, "input": "Hi"}, ("model",)


EVERY = (chat, completion, responses, message, inference, embedding)
GENERATING = EVERY[:-1]


def versions(make: Any = chat, **values: Any) -> Versions:
    if make is embedding:
        values["workers"] = [engine_info(operations=("embed",))]
        delta = TokenDelta(finish_reason=FinishReason.STOP, vectors=bytes(12))
        values["script"] = lambda _: [delta]
    return Versions(**values)


async def post(
    door: FrontDoor, made: tuple[str, dict[str, Any], tuple[str, ...]], **headers: str
) -> tuple[int, str | None, dict[str, str]]:
    """(status, the model that the answer names, headers)."""
    path, body, place = made
    body = {name: value for name, value in body.items() if value is not None}
    async with door.session.post(door.url + path, json=body, headers=headers) as response:
        said = await response.json()
        return response.status, said.get(place[0]), dict(response.headers)


@pytest.mark.parametrize("make", EVERY)
async def test_an_alias_goes_to_what_it_means_and_the_answer_names_it(make: Any) -> None:
    dispatcher = versions(make)
    async with doors(dispatcher) as door:
        for name, model in (("default", "v1"), ("v1", "v1"), ("v2", "small")):
            assert (await post(door, make(name)))[:2] == (200, model)
        assert dispatcher.dispatched == ["v1", "v1", "small"]
        status, _, _ = await post(door, make("other"))
        assert status == 404


@pytest.mark.parametrize("make", [chat, completion, embedding])
async def test_no_model_is_the_default(make: Any) -> None:
    dispatcher = versions(make)
    async with doors(dispatcher) as door:
        assert (await post(door, make(None)))[:2] == (200, "v1")
    async with doors(dispatcher, aliases={}) as door:
        assert (await post(door, make(None)))[0] == 400, "there are several"


@pytest.mark.parametrize("make", GENERATING)
async def test_a_session_keeps_its_version(make: Any) -> None:
    async with doors(versions(make)) as door:
        served = Counter[str]()
        for number in range(24):
            found = {
                (await post(door, make("mixed"), **{"X-Session-Id": f"s{number}"}))[1]
                for _ in range(2)
            }
            assert len(found) == 1
            served[str(found.pop())] += 1
        assert set(served) == {"v1", "v2"}
        _, metrics = await door.session.get(door.url + "/metrics"), door.services.metrics.render()
        line = f'commutator_alias_requests_total{{alias="mixed",model="v1"}} {2 * served["v1"]}.0'
        assert line in metrics.decode()


async def test_a_session_of_the_body_counts_and_without_one_each_request_is_drawn() -> None:
    async with doors(versions()) as door:
        for key in ("session_id", "prompt_cache_key"):
            path, body, place = chat("mixed")
            made = path, {**body, key: "mine"}, place
            assert len({(await post(door, made))[1] for _ in range(8)}) == 1
        assert {(await post(door, chat("mixed")))[1] for _ in range(40)} == {"v1", "v2"}


@pytest.mark.parametrize("make", EVERY)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RoutingError("none"), "no_worker"),
        (OverloadedError("full"), "overload"),
        (EngineOverloadedError("full"), "overload"),
        (EngineUnavailableError("lost"), "error"),
    ],
)
async def test_another_model_serves_what_the_first_cannot(
    make: Any, error: Exception, reason: str
) -> None:
    dispatcher = versions(make, fails={"v1": error})
    async with doors(dispatcher) as door:
        status, model, headers = await post(door, make("default"))
        assert (status, model) == (200, "v2")
        assert headers["X-Commutator-Fallback"] == f"v1 {reason}"
        dispatcher.fails["v2"] = error
        status, model, headers = await post(door, make("default"))
        assert (status, model) == (200, "small")
        assert headers["X-Commutator-Fallback"] == f"v1 {reason}, v2 {reason}"
        dispatcher.fails["small"] = error
        dispatcher.dispatched.clear()
        assert (await post(door, make("default")))[0] >= 429
        assert dispatcher.dispatched == ["v1", "v2", "small"], "each once"
        text = door.services.metrics.render().decode()
        labels = f'alias="default",model="v1",reason="{reason}",to="v2"'
        assert f"commutator_model_fallbacks_total{{{labels}}} 3.0" in text
        assert (await post(door, make("v1")))[0] >= 429, "who names a model gets that one"


async def test_what_is_too_long_goes_to_a_model_that_takes_it() -> None:
    dispatcher = versions(lengths={"v1": 8, "v2": 8})
    async with doors(dispatcher) as door:
        path, body, place = chat("default")
        made = path, {**body, "messages": [{"role": "user", "content": "Hi " * 40}]}, place
        status, model, headers = await post(door, made)
        assert (status, model) == (200, "small")
        assert headers["X-Commutator-Fallback"] == "v1 context_length"
        assert dispatcher.dispatched == ["small"]


async def test_a_mistake_of_the_client_is_answered_as_it_is() -> None:
    dispatcher = versions(fails={"v1": RequestError("temperature: wrong", "temperature")})
    async with doors(dispatcher) as door:
        status, _, headers = await post(door, chat("default"))
        assert status == 400
        assert "X-Commutator-Fallback" not in headers
        assert dispatcher.dispatched == ["v1"]


async def test_nothing_takes_over_once_output_was_sent() -> None:
    begun = answer("Hello there, friend!")

    def breaks(request: Any) -> list[Any]:
        return [*begun(request)[:2], EngineError("broken")]

    dispatcher = versions(script=breaks)
    async with doors(dispatcher) as door:
        path, body, _ = chat("default")
        async with door.session.post(door.url + path, json={**body, "stream": True}) as response:
            text = (await response.read()).decode()
            assert response.status == 200
        assert "Hello" in text
        assert "worker_failed" in text
        assert dispatcher.dispatched == ["v1"]
        # A whole answer was not begun, so another model makes all of it.
        assert (await post(door, chat("default")))[0] == 500
        assert dispatcher.dispatched[1:] == ["v1", "v2", "small"]


async def test_a_stream_that_has_not_begun_goes_to_another_model() -> None:
    begun = answer("Hello there!")

    def script(request: Any) -> list[Any]:
        last = dispatcher.dispatched[-1]
        return [EngineError("broken")] if last == "v1" else [*begun(request)]

    dispatcher = versions(script=script)
    async with doors(dispatcher) as door:
        for make in (chat, message, responses):
            path, body, _ = make("default")
            async with door.session.post(
                door.url + path, json={**body, "stream": True}
            ) as response:
                text = (await response.read()).decode()
                assert response.headers["X-Commutator-Fallback"] == "v1 error"
            assert '"model":"v2"' in text.replace(": ", ":")
            assert "worker_failed" not in text


async def test_rights_are_about_what_is_meant() -> None:
    ada = Principal(name="ada", models=frozenset({"v1"}))
    bob = Principal(name="bob", models=frozenset({"small"}))
    dispatcher = versions()
    async with doors(dispatcher, ada, bob) as door:
        for _ in range(20):
            assert (await post(door, chat("mixed"), **key_of("ada")))[:2] == (200, "v1")
        assert (await post(door, chat("mixed"), **key_of("bob")))[0] == 404
        assert (await post(door, chat("v2"), **key_of("bob")))[:2] == (200, "small")
        assert (await post(door, chat("v2"), **key_of("ada")))[0] == 404
        listed = {}
        for name in ("ada", "bob"):
            async with door.session.get(door.url + "/v1/models", headers=key_of(name)) as found:
                listed[name] = {one["id"] for one in (await found.json())["data"]}
        assert listed == {"ada": {"v1", "default", "mixed"}, "bob": {"small", "v2"}}
        dispatcher.fails = {"v1": RoutingError("none")}
        status, _, _ = await post(door, chat("default"), **key_of("ada"))
        assert status == 503, "nothing else may take its place"


async def test_lists_of_models_have_the_aliases() -> None:
    dispatcher = versions(lengths={"v1": 100, "v2": 50}, fails={"v2": RoutingError("none")})
    async with doors(dispatcher) as door:
        _, listed = await door.get("/v1/models")
        lengths = {one["id"]: one["max_model_len"] for one in listed["data"]}
        assert lengths.keys() == {*MODELS, "default", "mixed"}
        assert (lengths["default"], lengths["mixed"]) == (100, 50)
        status, card = await door.get("/v1/models/mixed")
        assert (status, card["id"]) == (200, "mixed")
        path, theirs = "/v1/models/mixed", {"anthropic-version": "2023-06-01"}
        async with door.session.get(door.url + path, headers=theirs) as found:
            assert (await found.json())["id"] == "mixed"
        async with door.session.post(door.url + "/v2/repository/index", json={}) as found:
            states = {one["name"]: one["state"] for one in await found.json()}
        assert states["mixed"] == "READY"
        assert states["default"] == "READY"
