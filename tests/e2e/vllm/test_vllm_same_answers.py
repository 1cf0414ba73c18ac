"""What a client gets from the front door is what it would have got from vLLM itself."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionMessageFunctionToolCall

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.smoke]

MODEL = "smollm2-135m"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": PLACE, "strict": True},
}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "parameters": PLACE, "strict": True},
}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0, "seed": 11},
    {"temperature": 0.8, "top_p": 0.9, "seed": 12, "presence_penalty": 0.5},
)
CLOSE = 1e-3
"""The same logprobs: what comes from the prefix cache was computed in other batches."""


def chat(asked: openai.OpenAI, text: str, **more: Any) -> ChatCompletion:
    messages = [{"role": "user", "content": text}]
    answer: ChatCompletion = asked.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        **more,
    )
    return answer


def streamed(asked: openai.OpenAI, text: str, **more: Any) -> list[Any]:
    """The deltas of a streamed chat."""
    messages = [{"role": "user", "content": text}]
    chunks: Iterable[Any] = asked.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        stream=True,
        **more,
    )
    return [chunk.choices[0].delta for chunk in chunks if chunk.choices]


@pytest.mark.proves("vllm", "the right greedy tokens", how="real engine on CPU")
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_greedy_and_seeded(
    client: openai.OpenAI, direct: openai.OpenAI, sampling: Mapping[str, Any]
) -> None:
    for text in ("Name three colours.", "Tell me about the sea."):
        ours, theirs = (chat(asked, text, max_tokens=24, **sampling) for asked in (client, direct))
        assert ours.choices[0].message.content == theirs.choices[0].message.content
        assert ours.choices[0].finish_reason == theirs.choices[0].finish_reason
        deltas = streamed(client, text, max_tokens=24, **sampling)
        said = "".join(delta.content or "" for delta in deltas)
        assert said == theirs.choices[0].message.content


def test_logprobs_of_a_chat(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    told = []
    for asked in (client, direct):
        answer = chat(
            asked,
            "What is the capital of France?",
            max_tokens=6,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        told.append(logprobs.content)
    assert len(told[0]) == 6
    for ours, theirs in zip(*told, strict=True):
        assert ours.token == theirs.token
        assert ours.bytes == theirs.bytes
        assert ours.logprob == pytest.approx(theirs.logprob, abs=CLOSE)
        assert {top.token: top.logprob for top in ours.top_logprobs} == pytest.approx(
            {top.token: top.logprob for top in theirs.top_logprobs}, abs=CLOSE
        )


def test_logprobs_of_a_completion(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    told = []
    for asked in (client, direct):
        answer = asked.completions.create(
            model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4, logprobs=2
        )
        assert "Paris" in answer.choices[0].text
        assert answer.choices[0].logprobs is not None
        told.append(answer.choices[0].logprobs)
    ours, theirs = told
    assert ours.tokens == theirs.tokens
    assert len(ours.tokens or ()) == 4
    assert ours.text_offset == theirs.text_offset
    assert ours.token_logprobs == pytest.approx(theirs.token_logprobs, abs=CLOSE)
    for one, other in zip(ours.top_logprobs or (), theirs.top_logprobs or (), strict=True):
        assert one == pytest.approx(other, abs=CLOSE)


def test_an_answer_by_a_json_schema(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    said = [
        chat(
            asked,
            "What is the capital of France?",
            temperature=0,
            max_tokens=60,
            response_format=SCHEMA,
        )
        .choices[0]
        .message.content
        for asked in (client, direct)
    ]
    assert json.loads(said[0] or "")["city"] in {"Paris", "Rome"}
    assert said[0] == said[1]


@pytest.mark.proves("vllm", "JSON schemas and tool calls", how="real engine on CPU")
def test_a_tool_call(client: openai.OpenAI, direct: openai.OpenAI) -> None:
    asking: dict[str, Any] = {
        "text": "What is the weather in Paris?",
        "temperature": 0,
        "max_tokens": 120,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,  # a small model would make many
    }
    said = []
    for asked in (client, direct):
        choice = chat(asked, **asking).choices[0]
        assert choice.finish_reason == "tool_calls"
        calls = choice.message.tool_calls
        assert calls is not None
        (call,) = calls
        assert isinstance(call, ChatCompletionMessageFunctionToolCall)
        said.append((call.function.name, call.function.arguments))
    assert said[0][0] == "get_weather"
    assert json.loads(said[0][1])["city"] in {"Paris", "Rome"}
    assert said[0] == said[1]
    pieces = [piece for delta in streamed(client, **asking) for piece in delta.tool_calls or ()]
    assert "".join(piece.function.name or "" for piece in pieces) == "get_weather"
    arguments = "".join(piece.function.arguments or "" for piece in pieces)
    assert json.loads(arguments) == json.loads(said[0][1])
