"""Two stand-ins of TensorRT-LLM's server behind the front door, with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tests.support.chat import compare_chat
from tests.support.draining import drain_in_turn
from tests.support.launched_servers import kill_server_at, server_urls, wait_for_workers
from tests.support.oracle import SOURCE, greedy
from tests.support.ten_turns import ten_turns
from tests.support.trtllm.cluster import SERVE, launched, load_of

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": SOURCE, "max_model_len": 1024}],
    "engines": [launched(SOURCE, name="t", replicas=2)],
    "router": {"kind": "kv"},
    "runtime": {"lease_s": 60, "restart_backoff_s": 0.1},  # a busy machine loses no worker
    "migration": {"wait_s": 300},
}
BLOCK = 32
STORY = "Once upon a time, in a small village by the sea,"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(DEPLOYMENT, start_timeout_s=300) as running:
        wait_for_workers(running, 2)
        yield running


@pytest.mark.proves("trtllm", "chat and completions, whole and streamed", how="stand-in")
def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    compare_chat(client, "m")


@pytest.mark.proves("trtllm", "the right greedy tokens", how="stand-in")
def test_completions_are_those_of_transformers(client: openai.OpenAI) -> None:
    text = load_text_model(SOURCE)
    for prompt in ("The capital of France is", "def fibonacci(n):\n    ", STORY):
        expected = text.decode(greedy(text.encode(prompt), 16))
        asked: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0, "max_tokens": 16}
        whole = client.completions.create(**asked, extra_body={"ignore_eos": True})
        assert whole.choices[0].text == expected
        streamed = client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        assert "".join(chunk.choices[0].text for chunk in streamed if chunk.choices) == expected


@pytest.mark.proves("trtllm", "routing by prefix finds what can be found", how="stand-in")
@pytest.mark.long
def test_ten_turns_find_what_can_be_found(client: openai.OpenAI) -> None:
    """At least 95 % of the whole blocks that the turn before left, as the server counts them."""
    found = ten_turns(client, "m", BLOCK)
    print(f"cached {found.cached} of {found.possible} possible tokens: {found.part:.1%}")
    assert found.part >= 0.95


@pytest.mark.proves("trtllm", "a worker killed: its answers go on elsewhere", how="stand-in")
@pytest.mark.long
def test_killed_while_it_answers(pair: LocalCluster, client: openai.OpenAI) -> None:
    """The stream goes on at the other server, and the lost one comes back with its sidecar."""
    asked: dict[str, Any] = {"model": "m", "prompt": STORY, "temperature": 0, "max_tokens": 60}
    whole = client.completions.create(**asked)
    with client.completions.with_streaming_response.create(**asked, stream=True) as response:
        worker = response.headers["X-Commutator-Worker"]
        pieces = []
        for number, chunk in enumerate(response.parse()):
            pieces.append(chunk.choices[0].text if chunk.choices else "")
            if number == 2:
                kill_server_at(pair, server_urls(pair, SERVE.name)[worker])
    assert "".join(pieces) == whole.choices[0].text
    pair.wait_for_log(f"migrated from {worker} to ")
    wait_for_workers(pair, 2)


@pytest.mark.proves("trtllm", "a worker drained: nothing fails", how="stand-in")
@pytest.mark.long
async def test_drained_under_traffic(pair: LocalCluster) -> None:
    """By its statistics a drained server computes nothing."""

    async def work(worker: str) -> float:
        load = await load_of(pair, worker)
        return load.running + load.waiting

    served = await drain_in_turn(pair.url, "m", ("t-0", "t-1"), work)
    print(f"streams: {dict(served)}, 0 failed")
