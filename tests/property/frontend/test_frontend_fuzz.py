"""Senseless bodies, with keys and without: answers keep their shape, nothing breaks or hangs."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from attrs import field, frozen
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from tests.support.front_door import MODEL, FakeDispatcher, answer, front_door
from tests.support.principals import gate_of, key_of

import commutator
from commutator.auth.gate import Gate
from commutator.contract.principal import Principal
from commutator_openai.openapi import openapi_document

DOCUMENT = openapi_document(commutator.__version__, [MODEL], needs_key=False)
SCHEMA = schemathesis.openapi.from_dict(copy.deepcopy(DOCUMENT))
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"]
EXPECTED = {200, 400, 403, 404, 405, 413, 415, 417, 504}
FEW_PHASES = [phase for phase in Phase if phase is not Phase.explain]

VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": MODEL,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "stop": ["a"],
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "tools": [],
        "n": 2,
    },
    "/v1/completions": {"model": MODEL, "prompt": ["a", "b"], "n": 2, "echo": True, "seed": 1},
    "/tokenize": {"prompt": "a", "return_token_strs": True},
    "/detokenize": {"tokens": [1, 2]},
}
LEAVES: st.SearchStrategy[Any] = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["", "a" * 2000, 2**31, 2**63, -1, 0, 1e308, "\x00", "\ud83d\ude00"])
)
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@frozen
class Door:
    """A front door, and what opens it."""

    url: str
    headers: dict[str, str] = field(factory=dict)


@pytest.fixture(scope="module", params=["without keys", "with keys"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """A front door in a thread, whose workers answer at once."""
    gate, headers = Gate(), {}
    if request.param == "with keys":
        gate = gate_of(Principal(name="alice"))
        headers = key_of("alice")
    dispatcher = FakeDispatcher(answer("An answer, 日本語 😀.", tokens_per_delta=3))
    started, stop = threading.Event(), threading.Event()
    found: list[str] = []

    async def serve() -> None:
        async with front_door(dispatcher, gate=gate) as served:
            found.append(served.url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    started.wait(10)
    yield Door(found[0], headers)
    stop.set()
    thread.join(10)
    assert dispatcher.open == 0, "an engine request was left running"


def check(response: requests.Response, path: str, stranger: requests.Response | None) -> None:
    """The status is one of those meant; the body is what the document says.

    ``stranger`` is the answer to the same without a key, where one is needed.
    """
    if stranger is not None:
        assert stranger.status_code in {400, 401}, stranger.text  # 400: it is no HTTP
        validate("ErrorBody", stranger.json())
    assert response.status_code in EXPECTED, response.text
    assert "Traceback" not in response.text
    if response.status_code >= 400:
        validate("ErrorBody", response.json())
        assert response.json()["error"]["message"]
    elif response.headers["Content-Type"].startswith("text/event-stream"):
        *events, done, end = response.text.split("\n\n")
        assert (done, end) == ("data: [DONE]", "")
        for event in events:
            assert "error" not in json.loads(event.removeprefix("data: "))
    else:
        operation = DOCUMENT["paths"][path]["post"]["responses"]["200"]
        reference = operation["content"]["application/json"]["schema"]["$ref"]
        validate(reference.rsplit("/", 1)[1], response.json())


def validate(name: str, value: Any) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        phases=FEW_PHASES,
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_what_schemathesis_makes_of_the_document(
    door: Door, path: str, mode: GenerationMode
) -> None:
    operation = SCHEMA[path]["POST"]

    @given(case=operation.as_strategy(generation_mode=mode))
    @examples(40)
    def run(case: Case[Any]) -> None:
        response = case.call(base_url=door.url, timeout=10, headers=door.headers)
        stranger = case.call(base_url=door.url, timeout=10) if door.headers else None
        refused = None if stranger is None else requests_response(stranger)
        check(requests_response(response), path, refused)

    run()


def requests_response(response: Any) -> requests.Response:
    made = requests.Response()
    made.status_code = response.status_code
    made._content = response.content
    made.headers.update({name: values[0] for name, values in response.headers.items()})
    made.encoding = "utf-8"
    return made


@pytest.mark.parametrize("path", PATHS)
def test_valid_bodies_with_something_replaced(door: Door, path: str) -> None:
    with requests.Session() as session:

        @given(data=st.data())
        @examples(60)
        def run(data: st.DataObject) -> None:
            body = mutate(copy.deepcopy(VALID[path]), data)
            ask = partial(session.post, door.url + path, json=body, timeout=10)
            check(ask(headers=door.headers), path, ask() if door.headers else None)

        run()


@pytest.mark.parametrize("path", PATHS)
def test_any_json_and_any_bytes(door: Door, path: str) -> None:
    with requests.Session() as session:

        @given(body=JSON.map(lambda value: json.dumps(value).encode()) | st.binary())
        @examples(30)
        def run(body: bytes) -> None:
            headers = {"Content-Type": "application/json"}
            ask = partial(session.post, door.url + path, data=body, timeout=10)
            stranger = ask(headers=headers) if door.headers else None
            check(ask(headers=headers | door.headers), path, stranger)

        run()


def mutate(value: Any, data: st.DataObject) -> Any:
    """Somewhere in ``value``, something is replaced, added or taken away."""
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)))
        match data.draw(st.sampled_from(["inside", "inside", "remove", "add"])):
            case "inside":
                return value | {key: mutate(value[key], data)}
            case "remove":
                return {name: kept for name, kept in value.items() if name != key}
            case _:
                return value | {data.draw(st.text()): data.draw(JSON)}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        return [*value[:-1], mutate(value[-1], data)]
    return data.draw(JSON)
