"""What every program here does: asks its client, and prints a line of JSON for each answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

URL, MODEL = sys.argv[1:3]
PERSON = "Who wrote the first program? (person)"
WEATHER = "How is the weather in Zürich? (weather)"
HELLO = "Say hello. (hello)"
WORD = "Remember the word heron."
AGAIN = "Which word? (again)"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def weather_in(city: str) -> str:
    """What the tool says, which the script waits for."""
    return f"sunny in {city}"


def report(asks: dict[str, Callable[[], Any]]) -> None:
    """Calls each, and prints its name with what it returned, or the error that it raised."""
    for name, ask in asks.items():
        line: dict[str, Any] = {"ask": name}
        try:
            line["got"] = ask()
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(line), flush=True)
