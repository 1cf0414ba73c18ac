"""OpenAI's Agents SDK by its default, which is Responses, and over chat completions."""

from __future__ import annotations

from typing import Any

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_default_openai_client,
    set_tracing_disabled,
)
from asks import AGAIN, MODEL, PERSON, URL, WEATHER, WORD, report, weather_in
from openai import AsyncOpenAI
from pydantic import BaseModel

set_tracing_disabled(True)


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


def client() -> AsyncOpenAI:
    """One for each run: each has an event loop of its own."""
    return AsyncOpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)


def by_default() -> Any:
    set_default_openai_client(client())
    return MODEL


def chat() -> Any:
    return OpenAIChatCompletionsModel(MODEL, client())


def weather(model: Any) -> str:
    agent = Agent("a", instructions="Answer.", model=model, tools=[get_weather])
    return str(Runner.run_sync(agent, WEATHER).final_output)


def person(model: Any) -> Any:
    agent = Agent("a", instructions="Answer.", model=model, output_type=Person)
    return Runner.run_sync(agent, PERSON).final_output.model_dump()


def again() -> str:
    first = Runner.run_sync(Agent("a", model=by_default()), WORD)
    agent = Agent("a", model=by_default())
    answer = Runner.run_sync(agent, AGAIN, previous_response_id=first.last_response_id)
    return str(answer.final_output)


report(
    {
        "by default: tools": lambda: weather(by_default()),
        "by default: output_type": lambda: person(by_default()),
        "by default: previous_response_id": again,
        "chat: tools": lambda: weather(chat()),
        "chat: output_type": lambda: person(chat()),
    }
)
