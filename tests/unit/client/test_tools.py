"""Functions that a model calls, over scripted answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from commutator_client import AsyncClient, Client, ClientError, Tool

ASKED = [{"role": "user", "content": "How is the weather?"}]


def weather(city: str, days: Annotated[int, Field(description="How many.")] = 1) -> dict[str, Any]:
    """The weather of a city."""
    if city == "Nowhere":
        raise ValueError("no such place")
    return {"city": city, "days": days}


async def units(system: Literal["metric", "imperial"]) -> str:
    return system


def calling(*calls: tuple[str, str]) -> dict[str, Any]:
    made = [
        {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": text}}
        for at, (name, text) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": None, "refusal": None, "tool_calls": made}
    return {"choices": [{"index": 0, "message": message}]}


SUNNY = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "Sunny."}}]}


@pytest.fixture
def asked() -> list[Any]:
    """The messages of each request."""
    return []


@pytest.fixture(params=["sync", "async"])
def run(
    request: pytest.FixtureRequest, asked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    async def ask(answers: list[Any], tools: list[Any], **options: Any) -> Any:
        left = iter(answers)

        def answer(self: object, messages: Any, model: str, **more: Any) -> Any:
            asked.append([*messages])
            return next(left)

        async def later(self: object, messages: Any, model: str, **more: Any) -> Any:
            return answer(self, messages, model)

        if request.param == "sync":
            monkeypatch.setattr(Client, "chat_completion", answer)
            return Client().run_tools(ASKED, tools, **options)
        monkeypatch.setattr(AsyncClient, "chat_completion", later)
        return await AsyncClient().run_tools(ASKED, tools, **options)

    return ask


def test_a_tool_is_described_by_its_annotations() -> None:
    function = Tool(weather).definition()["function"]
    assert (function["name"], function["description"]) == ("weather", "The weather of a city.")
    parameters = function["parameters"]
    assert parameters["required"] == ["city"]
    assert parameters["properties"]["days"]["description"] == "How many."
    described = Tool(units).definition()["function"]
    assert described["parameters"]["properties"]["system"]["enum"] == ["metric", "imperial"]
    assert "description" not in described


async def test_calls_are_made_until_there_are_none(
    run: Callable[..., Any], asked: list[Any]
) -> None:
    calls = calling(("weather", '{"city": "Oslo", "days": "2"}'), ("weather", '{"city": "Rome"}'))
    done = await run([calls, SUNNY], [weather])
    assert done.text == "Sunny."
    assert done.answer == SUNNY
    assert [one["role"] for one in done.messages] == [
        "user", "assistant", "tool", "tool", "assistant"
    ]  # fmt: skip
    assert json.loads(done.messages[2]["content"]) == {"city": "Oslo", "days": 2}
    assert done.messages[3]["tool_call_id"] == "c1"
    assert asked[1] == done.messages[:-1]
    assert asked[1][1]["content"] == "", "no null, which some templates print"


async def test_the_model_learns_what_is_wrong_with_a_call(run: Callable[..., Any]) -> None:
    calls = calling(
        ("weather", '{"city": 3}'), ("weather", "[1]"), ("wether", "{}"), ("weather", "{")
    )
    done = await run([calls, SUNNY], [weather])
    said = [one["content"] for one in done.messages if one["role"] == "tool"]
    assert "valid string" in said[0]
    assert "expected an object" in said[1]
    assert said[2] == "there is no tool wether; there are: weather"
    assert "wrong arguments" in said[3]


async def test_what_a_function_raises_is_the_program_s(run: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="no such place"):
        await run([calling(("weather", '{"city": "Nowhere"}'))], [weather])


async def test_a_model_that_goes_on_calling_is_stopped(
    run: Callable[..., Any], asked: list[Any]
) -> None:
    calls = calling(("weather", '{"city": "Rome"}'))
    with pytest.raises(ClientError, match="after 3 turns"):
        await run([calls] * 9, [weather], max_turns=3)
    assert len(asked) == 3


@pytest.mark.parametrize("tools", [[], [weather, Tool(weather)]])
async def test_tools_have_names_of_their_own(run: Callable[..., Any], tools: list[Any]) -> None:
    with pytest.raises(ValueError, match="each of another name"):
        await run([], tools)


async def test_functions_may_be_async(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([calling(("units", '{"system": "metric"}')), SUNNY])

    async def answer(self: object, messages: Any, model: str, **more: Any) -> Any:
        return next(answers)

    monkeypatch.setattr(AsyncClient, "chat_completion", answer)
    done = await AsyncClient().run_tools(ASKED, [units])
    assert done.messages[2]["content"] == "metric"
