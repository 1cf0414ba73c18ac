"""What the front door tells about itself, and the small endpoints."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any

import jsonschema
import pytest
from attrs import evolve
from prometheus_client.parser import text_string_to_metric_families
from tests.support.front_door import MODEL, TEXT, FakeDispatcher, answer, front_door

from commutator import __version__
from commutator.contract.operations import OPERATIONS_PREFIX
from commutator.contract.worker import KvStatistics, TierState
from commutator.registry.unready import UnreadyState, UnreadyWorker
from commutator.routing.disagg.prefill_pool import QueueState
from commutator_console.live import LiveFeed, live_routes
from commutator_http.administration import admin_routes


def statistics_of(tier: str, *, up: bool) -> KvStatistics:
    state = TierState(
        name=tier, medium="DISK", up=up, capacity=9, published=0, staged=0, leaving=0, waiting=0,
        loading=0, retained=0, pins_refused=0, loads={}, not_loaded={}, removed={}, latency_s=None,
        block_s=None,
    )  # fmt: skip
    return KvStatistics(
        tiers=(state,), edges=(), blocks=0, held_on_device=0, loads_running=0, stores_running=0
    )


async def test_live_ready_health() -> None:
    dispatcher = FakeDispatcher()
    async with front_door(dispatcher) as door:
        assert await door.get("/live") == (200, {"status": "ok"})
        assert await door.get("/ready") == (200, {"status": "ok"})
        status, health = await door.get("/health")
        assert status == 200
        versions = health.pop("versions")
        assert versions["commutator"] == __version__
        assert "commutator-openai" in versions
        assert health == {
            "status": "ready",
            "problems": [],
            "models": [MODEL],
            "unready_workers": [],
            "workers": [
                {
                    "worker_id": "fake-0",
                    "model": MODEL,
                    "kind": "fake",
                    "state": "ready",
                    "active_requests": 0,
                    "active_requests_of_all": 0,
                    "admin_address": None,
                    "role": "both",
                    "hands_over": False,
                    "engine": "",
                    "version": "",
                    "pid": None,
                    "host": "",
                    "block_size": 16,
                    "operations": [],
                }
            ],
            "requests": {"running": 0, "queued": 0},
            "waiting_for_a_worker": {MODEL: 0},
            "prefill_queues": {},
            "refused_handovers": [],
            "load_peers": 0,
            "indexed_blocks": {MODEL: 3},
            "registry": None,
            "registry_age_s": None,
            "socket": None,
            "warnings": [],
        }
        dispatcher.is_ready = False
        assert (await door.get("/health"))[1]["status"] == "degraded"
        status, body = await door.get("/ready")
        assert (status, body["error"]["code"]) == (503, "no_worker")
        assert (await door.get("/live"))[0] == 200


async def test_workers_that_do_not_start_and_tiers_that_are_down_degrade_the_run() -> None:
    dispatcher = FakeDispatcher()
    one = UnreadyWorker(worker_id="w-1", model=MODEL, kind="k", engine="w", since_unix_s=1.0)
    async with front_door(dispatcher) as door:
        door.services.unready = [one, evolve(one, worker_id="fake-0")]
        _, health = await door.get("/health")
        assert (health["status"], health["problems"]) == ("ready", []), "it only starts"
        (shown,) = health["unready_workers"]  # fake-0 has become ready meanwhile
        assert (shown["worker_id"], shown["state"]) == ("w-1", "starting")
        door.services.unready = [evolve(one, state=UnreadyState.FAILING, cause="no memory")]
        dispatcher.poll.kv = {"fake-0": statistics_of("nvme", up=False)}
        _, health = await door.get("/health")
        assert health["status"] == "degraded"
        assert health["problems"] == [
            "worker w-1 is failing: no memory",
            "the tier nvme of worker fake-0 is down",
        ]
        assert (await door.get("/ready"))[0] == 200, "requests are served nevertheless"


async def test_the_prefill_queue_is_shown() -> None:
    dispatcher = FakeDispatcher(queues={MODEL: QueueState(3, 1.5)})
    async with front_door(dispatcher) as door:
        _, health = await door.get("/health")
        assert health["prefill_queues"] == {MODEL: {"requests": 3, "oldest_s": 1.5}}
        async with door.session.get(f"{door.url}/metrics") as response:
            scraped = await response.text()
        assert f'commutator_prefill_queue_requests{{model="{MODEL}"}} 3.0' in scraped
        assert f'commutator_prefill_queue_age_seconds{{model="{MODEL}"}} 1.5' in scraped


async def test_models() -> None:
    async with front_door(FakeDispatcher(longest=2048), {"a/b": TEXT, "c": TEXT}) as door:
        _, listed = await door.get("/v1/models")
        assert listed["object"] == "list"
        assert [card["id"] for card in listed["data"]] == ["a/b", "c"]
        assert {card["max_model_len"] for card in listed["data"]} == {2048}
        assert await door.get("/v1/models/a/b") == (200, listed["data"][0])
        status, body = await door.get("/v1/models/d")
        assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_tokenize_and_back() -> None:
    text = "Hello 12 😀 <|im_end|>"
    async with front_door(FakeDispatcher()) as door:
        status, body = await door.post("/tokenize", {"prompt": text, "return_token_strs": True})
        assert status == 200
        assert body["tokens"] == TEXT.encode(text)
        assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
        assert body["max_model_len"] == 8192
        assert body["token_strs"][:2] == ["Hello", "Ġ"]
        _, back = await door.post("/detokenize", {"tokens": body["tokens"]})
        assert back == {"prompt": text}
        long = "word " * 20_000
        _, body = await door.post("/tokenize", {"prompt": long})
        _, back = await door.post("/detokenize", {"tokens": body["tokens"]})
        assert back == {"prompt": long}
        assert (await door.post("/detokenize", {"tokens": []}))[1] == {"prompt": ""}


async def test_tokenize_a_conversation() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    async with front_door(FakeDispatcher()) as door:
        _, body = await door.post("/tokenize", {"messages": messages})
        assert TEXT.decode(body["tokens"], skip_special_tokens=False).endswith("assistant\n")
        _, body = await door.post(
            "/tokenize", {"messages": messages, "add_generation_prompt": False}
        )
        assert TEXT.decode(body["tokens"], skip_special_tokens=False).endswith("Hi<|im_end|>\n")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [1], "model": "other"}, "model"),
    ],
)
async def test_wrong_bodies(path: str, body: dict[str, object], param: str) -> None:
    async with front_door(FakeDispatcher()) as door:
        status, answered = await door.post(path, body)
    assert status == (404 if param == "model" else 400)
    assert answered["error"]["param"] == param


async def test_the_model_may_be_left_out_when_there_is_one() -> None:
    async with front_door(FakeDispatcher()) as door:
        status, _ = await door.post("/tokenize", {"model": None, "prompt": "x"})
        assert status == 200
    async with front_door(FakeDispatcher(), {"a": TEXT, "b": TEXT}) as door:
        status, body = await door.post("/tokenize", {"model": None, "prompt": "x"})
        assert (status, body["error"]["param"]) == (400, "model")


async def test_metrics() -> None:
    dispatcher = FakeDispatcher(answer("one two three", cached_tokens=4), delay_s=0.01)
    async with front_door(dispatcher) as door:
        await door.chat()
        await door.chat(temperature="hot")
        await door.get("/no/such/path")
        running = asyncio.create_task(door.chat())
        while not dispatcher.open:
            await asyncio.sleep(0.001)
        async with door.session.get(f"{door.url}/metrics") as response:
            text = await response.text()
        await running
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    chat = "/v1/chat/completions"
    assert samples["commutator_requests_total", chat, "200", MODEL] == 1
    assert samples["commutator_requests_total", "", chat, "400"] == 1
    assert samples["commutator_requests_total", "", "404", "other"] == 1
    assert samples["commutator_active_requests",] == 1
    assert samples["commutator_queued_requests",] == 0
    assert samples["commutator_output_tokens_total", MODEL] == 4
    assert samples["commutator_output_sequence_tokens_sum", MODEL] == 4
    assert samples["commutator_cached_tokens_total", MODEL] == 4
    prompt_tokens = len(dispatcher.requests[0].token_ids)
    assert samples["commutator_prompt_tokens_total", MODEL] == prompt_tokens
    assert samples["commutator_input_sequence_tokens_sum", MODEL] == prompt_tokens
    assert samples["commutator_router_decision_seconds_count", MODEL] == 2
    assert samples["commutator_router_overlap_blocks_total", MODEL] == 4
    assert samples["commutator_router_given_up_blocks_total", MODEL] == 2
    assert samples["commutator_router_kv_hit_rate_sum", MODEL] == 1.0
    assert samples["commutator_router_fallbacks_total", MODEL] == 2
    assert samples["commutator_inter_token_latency_seconds_count", MODEL] == 3
    assert samples["commutator_time_to_first_token_seconds_sum", MODEL] > 0.01
    assert samples["commutator_request_duration_seconds_count", chat, MODEL] == 1
    assert all(name[0].startswith("commutator_") for name in samples)


async def test_one_log_line_a_request(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "commutator")
    async with front_door(FakeDispatcher(answer("one two", cached_tokens=4))) as door:
        await door.chat(user='ann\n"x"')
        await door.get("/live")
    (line,) = [record.getMessage() for record in caplog.records if " id=" in record.getMessage()]
    assert line.startswith("/v1/chat/completions 200 id=")
    assert "model=smol worker=fake-0 tokens=31+3 cached=4 ttft=" in line
    assert r'user="ann\n\"x\""' in line


async def test_the_log_line_of_a_refused_request_tells_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "commutator")
    async with front_door(FakeDispatcher()) as door:
        await door.chat(n=0)
        await door.get('/v1/no"where?key=secret')
        await door.post("/v1/responses", {"model": MODEL, "input": "x"})
    lines = [record.getMessage() for record in caplog.records if " id=" in record.getMessage()]
    assert [re.sub(r"id=\S+ took=\S+ ", "", line) for line in lines] == [
        '/v1/chat/completions 400 reason=invalid_value param="n"',
        r'other 404 path="/v1/no\"where" reason=not_found',
        f"/v1/responses 400 reason=unsupported_endpoint model={MODEL}",
    ]


async def test_openapi_describes_what_is_answered() -> None:
    async with front_door(FakeDispatcher()) as door:
        _, document = await door.get("/openapi.json")
        assert document["openapi"] == "3.1.0"
        admin: list[Any] = [
            *admin_routes(door.services, lambda _: "root"),
            *live_routes(LiveFeed(door.services)),
        ]
        assert {
            (path, method)
            for path, methods in document["paths"].items()
            if path.startswith(OPERATIONS_PREFIX)
            for method in methods
        } == {(route.path, route.method.lower()) for route in admin}
        assert {path for path in document["paths"] if not path.startswith(OPERATIONS_PREFIX)} == {
            *("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{id}"),
            *("/v1/chat/completions/batch", "/invocations", "/tokenizer_info", "/version", "/load"),
            *("/tokenize", "/detokenize", "/health", "/live", "/ready", "/metrics"),
            *("/openapi.json", "/v1/embeddings"),
        }
        for path, schema in [
            ("/v1/models", "ModelList"),
            (f"/v1/models/{MODEL}", "ModelCard"),
            ("/nowhere", "ErrorBody"),
        ]:
            check(document, schema, (await door.get(path))[1])
        check(document, "ChatCompletion", (await door.chat(logprobs=True, n=2))[1])
        check(document, "Completion", (await door.complete(logprobs=2))[1])
        check(document, "TokenizeResponse", (await door.post("/tokenize", {"prompt": "x"}))[1])
        check(document, "ErrorBody", (await door.chat(n=0))[1])
        with pytest.raises(jsonschema.ValidationError):
            check(document, "Completion", (await door.chat())[1])


def check(document: dict[str, object], name: str, value: object) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


async def test_a_slash_at_the_end_does_not_matter() -> None:
    async with front_door(FakeDispatcher()) as door:
        async with door.session.get(f"{door.url}/v1/models") as plain:
            listed = await plain.json()
        async with door.session.get(f"{door.url}/v1/models/") as answer:
            assert (answer.status, await answer.json()) == (200, listed)
        body = {"model": MODEL, "prompt": "Hi"}
        async with door.session.post(f"{door.url}/v1/completions/", json=body) as answer:
            assert answer.status == 200
