"""The first thing a newcomer does, with the official client, unmodified."""

from __future__ import annotations

import openai
import pytest
from tests.e2e.conftest import MODEL

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the capital of France?"}
]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streaming(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            temperature=0,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    assert len(chunks) > 4
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 3


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8
    )
    assert "Paris" in answer.choices[0].text


def test_completions_streaming(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=8, stream=True
    )
    assert "Paris" in "".join(chunk.choices[0].text for chunk in stream)


@pytest.mark.proves(
    "reference", "chat and completions, whole and streamed", how="real engine on CPU"
)
def test_streamed_and_whole_answers_agree(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "Write three words in Japanese, with emoji."}
    ]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=40
    )
    chunks = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, max_tokens=40, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert "\ufffd" not in text


def test_logprobs_stop_n_and_seed(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content

    stopped = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, max_tokens=20, stop=["Paris"]
    )
    assert "Paris" not in (stopped.choices[0].message.content or "")
    assert stopped.choices[0].finish_reason == "stop"

    def sample(seed: int) -> list[str | None]:
        made = client.chat.completions.create(
            model=MODEL, messages=QUESTION, temperature=1.2, max_tokens=12, seed=seed, n=2
        )
        return [choice.message.content for choice in made.choices]

    assert sample(3) == sample(3)
    assert sample(3)[0] != sample(3)[1]


def test_a_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    prompt = "In the beginning there was a very long prompt. " * 12
    cached = []
    for _ in range(4):  # two workers in turn: the third and fourth find it
        answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached[:2] == [0, 0]
    assert all(count is not None and count >= 96 for count in cached[2:])


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4", messages=QUESTION)
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,
            tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}],
        )
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 20000)
    assert caught.value.code == "context_length_exceeded"
