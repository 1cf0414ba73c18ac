"""LiteLLM, to OpenAI's API and to Anthropic's."""

from __future__ import annotations

import json
from typing import Any

import litellm
from asks import HELLO, MODEL, PARAMETERS, PERSON, URL, WEATHER, report, weather_in
from pydantic import BaseModel

OPENAI = {"model": f"openai/{MODEL}", "api_base": f"{URL}/v1", "api_key": "x", "num_retries": 0}
ANTHROPIC = {"model": f"anthropic/{MODEL}", "api_base": URL, "api_key": "x", "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS},
}


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def asked(way: dict[str, Any], text: str, **options: Any) -> Any:
    return litellm.completion(messages=[{"role": "user", "content": text}], **way, **options)


def streamed(way: dict[str, Any]) -> str:
    chunks = asked(way, HELLO, stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def weather(way: dict[str, Any]) -> str:
    said = [{"role": "user", "content": WEATHER}]
    first = litellm.completion(messages=said, tools=[TOOL], **way).choices[0].message
    results = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": weather_in(json.loads(call.function.arguments)["city"]),
        }
        for call in first.tool_calls
    ]
    history = [*said, first.model_dump(), *results]
    return litellm.completion(messages=history, tools=[TOOL], **way).choices[0].message.content


def person(way: dict[str, Any]) -> Any:
    said = asked(way, PERSON, response_format=Person).choices[0].message.content
    return Person.model_validate_json(said).model_dump()


report(
    {
        "openai: stream": lambda: streamed(OPENAI),
        "openai: tools": lambda: weather(OPENAI),
        "openai: response_format": lambda: person(OPENAI),
        "anthropic: stream": lambda: streamed(ANTHROPIC),
        "anthropic: tools": lambda: weather(ANTHROPIC),
        "anthropic: response_format": lambda: person(ANTHROPIC),
    }
)
