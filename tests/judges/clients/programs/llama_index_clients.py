"""LlamaIndex's models of OpenAI-like servers and of Anthropic, which takes known names only."""

from __future__ import annotations

from typing import Any

from asks import HELLO, MODEL, PERSON, URL, WEATHER, report, weather_in
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.anthropic import Anthropic
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


openai = OpenAILike(
    model=MODEL,
    api_base=f"{URL}/v1",
    api_key="x",
    max_retries=0,
    context_window=65_536,
    is_chat_model=True,
    is_function_calling_model=True,
    should_use_structured_outputs=True,
)
anthropic = Anthropic(model="claude-haiku-4-5", base_url=URL, api_key="x", max_retries=0)


def streamed(model: Any) -> str:
    said = [ChatMessage(role="user", content=HELLO)]
    return "".join(chunk.delta or "" for chunk in model.stream_chat(said))


def weather(model: Any) -> str:
    tool = FunctionTool.from_defaults(get_weather)
    said = [ChatMessage(role="user", content=WEATHER)]
    first = model.chat_with_tools([tool], chat_history=said)
    results = [
        ChatMessage(
            role="tool",
            content=str(tool(**call.tool_kwargs)),
            additional_kwargs={"tool_call_id": call.tool_id},
        )
        for call in model.get_tool_calls_from_response(first)
    ]
    history = [*said, first.message, *results]
    return str(model.chat_with_tools([tool], chat_history=history).message.content)


def person(model: Any) -> Any:
    said = [ChatMessage(role="user", content=PERSON)]
    return model.as_structured_llm(Person).chat(said).raw.model_dump()


report(
    {
        f"{name}: {what}": lambda ask=ask, model=model: ask(model)
        for name, model in (("openai", openai), ("anthropic", anthropic))
        for what, ask in (
            ("stream", streamed),
            ("chat_with_tools", weather),
            ("as_structured_llm", person),
        )
    }
)
