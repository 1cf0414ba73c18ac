"""Pydantic AI's agents with a tool, and with each way to an `output_type`."""

from __future__ import annotations

from typing import Any

from asks import MODEL, PERSON, URL, WEATHER, report, weather_in
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


class Person(BaseModel):
    """A person."""

    name: str
    age: int


of_openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="x")
chat, responses = (
    OpenAIChatModel(MODEL, provider=of_openai),
    OpenAIResponsesModel(MODEL, provider=of_openai),
)
anthropic = AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="x"))


def get_weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


def weather(model: Any) -> str:
    return Agent(model, tools=[get_weather], retries=0).run_sync(WEATHER).output


def person(model: Any, output: Any) -> Any:
    return Agent(model, output_type=output, retries=0).run_sync(PERSON).output.model_dump()


report(
    {
        "chat: tools": lambda: weather(chat),
        "chat: output_type": lambda: person(chat, Person),
        "chat: output_type, ToolOutput": lambda: person(chat, ToolOutput(Person)),
        "chat: output_type, NativeOutput": lambda: person(chat, NativeOutput(Person)),
        "chat: output_type, PromptedOutput": lambda: person(chat, PromptedOutput(Person)),
        "responses: tools": lambda: weather(responses),
        "responses: output_type": lambda: person(responses, Person),
        "anthropic: tools": lambda: weather(anthropic),
        "anthropic: output_type": lambda: person(anthropic, Person),
        "anthropic: output_type, PromptedOutput": lambda: person(anthropic, PromptedOutput(Person)),
    }
)
