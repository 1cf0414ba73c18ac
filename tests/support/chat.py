"""A question that the model surely knows to answer, asked by the openai client."""

from __future__ import annotations

import openai
from openai.types.chat import ChatCompletionMessageParam as Message

__all__ = ["compare_chat"]

_QUESTION: list[Message] = [{"role": "user", "content": "What is the capital of France?"}]


def compare_chat(client: openai.OpenAI, model: str) -> int:
    """Whole it is right, streamed it is the same text; returns the number of chunks of that."""
    whole = client.chat.completions.create(
        model=model, messages=_QUESTION, temperature=0, max_tokens=20
    )
    assert "Paris" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=model, messages=_QUESTION, temperature=0, max_tokens=20, stream=True
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    return len(chunks)
