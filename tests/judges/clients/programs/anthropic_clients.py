"""Anthropic's own client, which checks every field and event that it reads."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic
from asks import HELLO, MODEL, PARAMETERS, PERSON, URL, WEATHER, report, weather_in
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


client = Anthropic(base_url=URL, api_key="x", max_retries=0, _strict_response_validation=True)
messages = client.messages
TOOL: Any = {"name": "get_weather", "description": "Weather.", "input_schema": PARAMETERS}


def asked(text: str) -> dict[str, Any]:
    return {
        "model": MODEL,
        "max_tokens": 999,
        "messages": [{"role": "user", "content": text}],
    }


def text_of(answer: Any) -> str:
    return "".join(block.text for block in answer.content if block.type == "text")


def streamed() -> str:
    with messages.stream(**asked(HELLO)) as stream:
        return "".join(stream.text_stream)


def weather(first: Any) -> str:
    """The answer to the calls of the first one."""
    asking = asked(WEATHER)
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": weather_in(block.input["city"]),
        }
        for block in first.content
        if block.type == "tool_use"
    ]
    asking["messages"] += [
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": results},
    ]
    return text_of(messages.create(**asking, tools=[TOOL]))


def tools_stream() -> str:
    with messages.stream(**asked(WEATHER), tools=[TOOL]) as stream:
        return weather(stream.get_final_message())


def thinking() -> list[str]:
    wanted: Any = {"type": "adaptive"}
    answer = messages.create(**asked(WEATHER), tools=[TOOL], thinking=wanted)
    thoughts = [block.thinking for block in answer.content if block.type == "thinking"]
    return [*thoughts, str(answer.stop_reason)]


def parsed() -> Any:
    answer = messages.parse(**asked(PERSON), output_format=Person)
    return answer.parsed_output.model_dump()


def counted() -> bool:
    asking = asked(HELLO)
    used = messages.create(**asking).usage
    del asking["max_tokens"]
    read = used.input_tokens + (used.cache_read_input_tokens or 0)
    return messages.count_tokens(**asking).input_tokens == read


report(
    {
        "messages": lambda: text_of(messages.create(**asked(HELLO))),
        "messages, stream": streamed,
        "messages, tools": lambda: weather(messages.create(**asked(WEATHER), tools=[TOOL])),
        "messages, tools, stream": tools_stream,
        "messages, thinking": thinking,
        "messages, parse": parsed,
        "messages, count_tokens": counted,
    }
)
