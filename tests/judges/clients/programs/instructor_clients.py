"""Instructor's modes, for OpenAI's client and for Anthropic's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import anthropic
import instructor
import openai
from asks import MODEL, PERSON, URL, report
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


SAID = [{"role": "user", "content": PERSON}]


def by_openai(mode: Any) -> Any:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    made = instructor.from_openai(plain, mode=mode)
    return made.chat.completions.create(
        model=MODEL, messages=SAID, response_model=Person, max_retries=0
    ).model_dump()


def by_anthropic(mode: Any) -> Any:
    plain = anthropic.Anthropic(base_url=URL, api_key="x", max_retries=0)
    made = instructor.from_anthropic(plain, mode=mode)
    return made.messages.create(
        model=MODEL, max_tokens=99, messages=SAID, response_model=Person, max_retries=0
    ).model_dump()


def in_parallel() -> Any:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    made = instructor.from_openai(plain, mode=instructor.Mode.PARALLEL_TOOLS)
    found = made.chat.completions.create(
        model=MODEL, messages=SAID, response_model=Iterable[Person], max_retries=0
    )
    return [one.model_dump() for one in found]


def by_responses() -> Any:
    plain = openai.OpenAI(base_url=f"{URL}/v1", api_key="x", max_retries=0)
    made = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    return made.responses.create(
        model=MODEL, input=PERSON, response_model=Person, max_retries=0
    ).model_dump()


MODES = ("TOOLS", "TOOLS_STRICT", "JSON", "JSON_SCHEMA", "MD_JSON")
report(
    {
        **{f"openai: {one}": partial(by_openai, instructor.Mode[one]) for one in MODES},
        "openai: PARALLEL_TOOLS": in_parallel,
        "openai: RESPONSES_TOOLS": by_responses,
        "anthropic: TOOLS": lambda: by_anthropic(instructor.Mode.ANTHROPIC_TOOLS),
        "anthropic: JSON": lambda: by_anthropic(instructor.Mode.ANTHROPIC_JSON),
    }
)
