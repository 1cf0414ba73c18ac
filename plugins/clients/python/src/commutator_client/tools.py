"""Functions of a program that a model may call."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from commutator_client.errors import ClientError


@dataclass(frozen=True, slots=True)
class Tool:
    """A function, and how the model learns of it. Its parameters need annotations."""

    function: Callable[..., Any]
    """May be async, in an ``AsyncClient``."""

    @property
    def name(self) -> str:
        """By which the model calls it."""
        name: str = self.function.__name__
        return name

    def definition(self) -> dict[str, Any]:
        """As an entry of `tools`: the docstring describes it, the annotations its parameters."""
        from pydantic import TypeAdapter

        function: Any = self.function
        schema = TypeAdapter(function).json_schema()
        described = inspect.getdoc(self.function)
        told = {"name": self.name, "parameters": schema}
        if described:
            told["description"] = described
        return {"type": "function", "function": told}

    def call(self, arguments: str) -> Callable[[], Any]:
        """What calls the function with the JSON of its arguments.

        Raises ValueError, which says to the model what is wrong with them.
        """
        from pydantic import TypeAdapter
        from pydantic_core import ArgsKwargs

        values = json.loads(arguments or "{}")
        if not isinstance(values, dict):
            raise ValueError(  # noqa: TRY004 - a mistake of the model, not of the caller
                "expected an object with the arguments by name"
            )

        def take(*args: Any, **kwargs: Any) -> Callable[[], Any]:
            return partial(self.function, *args, **kwargs)

        # Validation calls what it validates for: this only takes the arguments.
        taking: Any = take
        taking.__signature__ = signature = inspect.signature(self.function, eval_str=True)
        taking.__annotations__ = {
            **{one.name: one.annotation for one in signature.parameters.values()},
            "return": Any,
        }
        taken: Callable[[], Any] = TypeAdapter(taking).validate_python(ArgsKwargs((), values))
        return taken


def tools_of(functions: Sequence[Callable[..., Any] | Tool]) -> dict[str, Tool]:
    """By name. Raises ValueError for two of one name."""
    tools = [one if isinstance(one, Tool) else Tool(one) for one in functions]
    by_name = {tool.name: tool for tool in tools}
    if not tools or len(by_name) < len(tools):
        raise ValueError("tools: expected at least one function, each of another name")
    return by_name


class Turns:
    """A conversation in which a model calls tools, without the sending and the calling."""

    def __init__(
        self,
        messages: Sequence[Mapping[str, Any]],
        functions: Sequence[Callable[..., Any] | Tool],
    ) -> None:
        self.tools = tools_of(functions)
        self.messages: list[dict[str, Any]] = [dict(one) for one in messages]

    def definitions(self) -> list[dict[str, Any]]:
        """What the model is told."""
        return [tool.definition() for tool in self.tools.values()]

    def answered(self, completion: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Enter what the model said; the calls that it wants now."""
        said = completion["choices"][0]["message"]
        message = {name: value for name, value in said.items() if value is not None}
        message.setdefault("content", "")
        self.messages.append(message)
        return message.get("tool_calls") or ()

    def call(self, call: Mapping[str, Any]) -> Callable[[], Any]:
        """What calls the tool, or says what is wrong with the call."""
        name = call["function"]["name"]
        if name not in self.tools:
            return lambda: f"there is no tool {name}; there are: {', '.join(self.tools)}"
        try:
            return self.tools[name].call(call["function"]["arguments"])
        except ValueError as error:
            problem = f"wrong arguments: {error}"
            return lambda: problem

    def returned(self, call: Mapping[str, Any], result: Any) -> None:
        """Enter the result of a call: a text, or what JSON can say."""
        text = result if isinstance(result, str) else json.dumps(result, default=str)
        self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})

    @staticmethod
    def too_many(most: int) -> ClientError:
        """The error for a model that goes on calling."""
        return ClientError(f"the model still calls tools after {most} turns (max_turns)")
