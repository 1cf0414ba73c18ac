"""OpenAI's own client, which checks every field and event that it reads."""

from __future__ import annotations

import json
from typing import Any

from asks import AGAIN, HELLO, MODEL, PARAMETERS, PERSON, URL, WEATHER, WORD, report, weather_in
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


client = OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0, _strict_response_validation=True)
chat, responses = client.chat.completions, client.responses
FUNCTION = {"name": "get_weather", "description": "Weather.", "parameters": PARAMETERS}
TOOL: Any = {"type": "function", "function": FUNCTION}
FLAT_TOOL: Any = {"type": "function", "strict": False, **FUNCTION}


def said(text: str) -> Any:
    return [{"role": "user", "content": text}]


def chat_stream() -> str:
    chunks = chat.create(model=MODEL, messages=said(HELLO), stream=True)
    return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)


def weather(message: Any) -> str:
    """The answer to the calls of the first message."""
    results = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": weather_in(json.loads(call.function.arguments)["city"]),
        }
        for call in message.tool_calls
    ]
    history = [*said(WEATHER), message, *results]
    answer = chat.create(model=MODEL, messages=history, tools=[TOOL])
    return answer.choices[0].message.content or ""


def chat_tools() -> str:
    first = chat.create(model=MODEL, messages=said(WEATHER), tools=[TOOL])
    return weather(first.choices[0].message)


def chat_tools_stream() -> str:
    with chat.stream(model=MODEL, messages=said(WEATHER), tools=[TOOL]) as stream:
        return weather(stream.get_final_completion().choices[0].message)


def chat_parse() -> Any:
    answer = chat.parse(model=MODEL, messages=said(PERSON), response_format=Person)
    return answer.choices[0].message.parsed.model_dump()


def responses_stream() -> str:
    with responses.stream(model=MODEL, input=HELLO) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        assert text == stream.get_final_response().output_text
        return text


def responses_tools() -> str:
    first = responses.create(model=MODEL, input=WEATHER, tools=[FLAT_TOOL])
    results = [
        {
            "type": "function_call_output",
            "call_id": item.call_id,
            "output": weather_in(json.loads(item.arguments)["city"]),
        }
        for item in first.output
        if item.type == "function_call"
    ]
    history: Any = [*said(WEATHER), *first.output, *results]
    return responses.create(model=MODEL, input=history, tools=[FLAT_TOOL]).output_text


def responses_parse() -> Any:
    answer = responses.parse(model=MODEL, input=PERSON, text_format=Person)
    return answer.output_parsed.model_dump()


def again() -> str:
    first = responses.create(model=MODEL, input=WORD)
    return responses.create(model=MODEL, input=AGAIN, previous_response_id=first.id).output_text


report(
    {
        "chat": lambda: chat.create(model=MODEL, messages=said(HELLO)).choices[0].message.content,
        "chat, stream": chat_stream,
        "chat, tools": chat_tools,
        "chat, tools, stream": chat_tools_stream,
        "chat, parse": chat_parse,
        "responses": lambda: responses.create(model=MODEL, input=HELLO).output_text,
        "responses, stream": responses_stream,
        "responses, tools": responses_tools,
        "responses, parse": responses_parse,
        "responses, previous_response_id": again,
    }
)
