"""LangChain's chat models of OpenAI, by both of its APIs, and of Anthropic."""

from __future__ import annotations

from typing import Any

from asks import AGAIN, HELLO, MODEL, PERSON, URL, WEATHER, WORD, report, weather_in
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return weather_in(city)


openai = ChatOpenAI(model=MODEL, base_url=f"{URL}/v1", api_key="x", max_retries=0)
responses = ChatOpenAI(
    model=MODEL,
    base_url=f"{URL}/v1",
    api_key="x",
    max_retries=0,
    use_responses_api=True,
    use_previous_response_id=True,
    output_version="responses/v1",
)
anthropic = ChatAnthropic(model=MODEL, base_url=URL, api_key="x", max_retries=0)


def weather(model: Any) -> str:
    bound, said = model.bind_tools([get_weather]), [HumanMessage(WEATHER)]
    first = bound.invoke(said)
    results = [get_weather.invoke(call) for call in first.tool_calls]
    return bound.invoke([*said, first, *results]).text


def streamed(model: Any) -> str:
    return "".join(chunk.text for chunk in model.stream(HELLO))


def person(model: Any, method: str) -> Any:
    return model.with_structured_output(Person, method=method).invoke(PERSON).model_dump()


def again() -> str:
    said = [HumanMessage(WORD)]
    return responses.invoke([*said, responses.invoke(said), HumanMessage(AGAIN)]).text


report(
    {
        "openai: stream": lambda: streamed(openai),
        "openai: bind_tools": lambda: weather(openai),
        **{
            f"openai: with_structured_output, {method}": lambda method=method: person(
                openai, method
            )
            for method in ("json_schema", "json_mode", "function_calling")
        },
        "openai: Responses, bind_tools": lambda: weather(responses),
        "openai: Responses, with_structured_output": lambda: person(responses, "json_schema"),
        "openai: Responses, previous_response_id": again,
        "anthropic: stream": lambda: streamed(anthropic),
        "anthropic: bind_tools": lambda: weather(anthropic),
        **{
            f"anthropic: with_structured_output, {method}": lambda method=method: person(
                anthropic, method
            )
            for method in ("json_schema", "function_calling")
        },
    }
)
