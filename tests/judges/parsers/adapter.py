"""Hands the judge's raw answers to the parsers that serve requests, and back what they say.

The parser gets the text in pieces, the prompt's end and the tools, and nothing else of a case.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from canitoolcall.adapters.base import Adapter, ReplayInput, Support, ToolSpec
from canitoolcall.fixtures import load_families
from canitoolcall.results import ParseResult, StreamAccumulator

from commutator import __version__
from commutator.contract.answer import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    ReasoningContent,
)
from commutator.contract.conversation import Conversation, Message, Tool
from commutator.contract.parser import AnswerParser, ParserConfig, ParserModel
from commutator_parsers.model import ModelParser

_PARSERS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "qwen3-hermes": (("", "hermes", "think"),),
    "qwen3-xml": (("", "qwen3_coder", "think_or_call"),),
    "gpt-oss": (("", "gpt_oss", "none"),),
    "deepseek": (
        ("V4.1", "deepseek_v4_1", "think"),
        ("V4", "deepseek_v3_2", "think"),
        ("V3.2", "deepseek_v3_2", "think"),
        ("", "deepseek_v3", "think"),
    ),
    "kimi": (("K3", "kimi_k3", "none"), ("", "kimi_k2", "think_or_call")),
    "glm": (("", "glm", "think"),),
    "llama": (("Llama-4", "llama4_pythonic", "none"), ("", "llama3_json", "none")),
    "mistral": (("", "mistral", "mistral"),),
    "gemma4": (("", "gemma4", "gemma4"),),
}
"""As an operator names them: by the model's family, and by what its name has."""


def parser_of(family: str, model: str) -> tuple[str, str]:
    """(tool parser, reasoning parser) of a model."""
    return next((tool, how) for part, tool, how in _PARSERS[family] if part in model)


def parser_for(raw: ReplayInput, tools: Sequence[ToolSpec]) -> AnswerParser | None:
    """What reads the answer."""
    name, reasoning = parser_of(raw.family, raw.model)
    model = ParserModel(name=raw.model, chat_template=None, special_tokens={}, reasoning=reasoning)
    parser = ModelParser(ParserConfig(kind=name), model)
    asked = [tool.get("function", tool) for tool in tools]
    conversation = Conversation(
        messages=[Message(role="user", content="hello")],
        tools=[Tool(name=one["name"], parameters=one.get("parameters") or {}) for one in asked],
    )
    return parser.answer(conversation, raw.generation_prompt or "")


def events_of(
    raw: ReplayInput, pieces: Iterable[str], tools: Sequence[ToolSpec]
) -> list[AnswerEvent]:
    """The events of an answer that came in these pieces."""
    answer = parser_for(raw, tools)
    if answer is None:
        return [Content("".join(pieces))]
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += answer.feed(piece)
    last, _ = answer.finish("length" if raw.truncated else "stop")
    return [*events, *last]


def merged(events: Iterable[AnswerEvent]) -> list[tuple[object, ...]]:
    """The events, neighbours of one kind as one, and calls without their ids."""
    found: list[tuple[object, ...]] = []
    for event in events:
        kind = type(event).__name__
        if isinstance(event, CallStart):
            found.append((kind, event.call, event.name))
        elif isinstance(event, Content | ReasoningContent | CallArguments):
            key = (kind, getattr(event, "call", None))
            if found and found[-1][:2] == key:
                found[-1] = (*key, f"{found[-1][2]}{event.text}")
            else:
                found.append((*key, event.text))
        else:
            found.append((kind, getattr(event, "call", None)))
    return found


def result_of(events: Iterable[AnswerEvent]) -> ParseResult:
    """What a client gets. A call that never ended is none: see ``commutator.contract.answer``."""
    events = list(events)
    ended = {event.call for event in events if isinstance(event, CallEnd)}
    found = StreamAccumulator()
    for event in events:
        if isinstance(event, Content):
            found.add_content(event.text)
        elif isinstance(event, ReasoningContent):
            found.add_reasoning(event.text)
        elif isinstance(event, CallStart) and event.call in ended:
            found.add_tool_call(event.call, event.name)
        elif isinstance(event, CallArguments) and event.call in ended:
            found.add_tool_call(event.call, None, event.text)
    return found.result()


class Commutator(Adapter):  # type: ignore[misc]
    """The judge's adapter."""

    name: ClassVar[str] = "commutator"
    pinned_version: ClassVar[str] = __version__
    supports_text_deltas: ClassVar[bool] = True

    def version(self) -> str:
        return __version__

    def supports(self, family: str, model: str) -> Support:
        return Support(family in _PARSERS)

    def parser_config(self, raw: ReplayInput) -> dict[str, Any]:
        tool, reasoning = parser_of(raw.family, raw.model)
        return {"tool_parser": tool, "reasoning_parser": reasoning}

    def units(self, raw: ReplayInput) -> list[int]:
        return [number for number, _ in enumerate(self._pieces(raw))]

    def special_token_ids(self, raw: ReplayInput) -> set[int]:
        return {number for number, piece in enumerate(self._pieces(raw)) if len(piece) > 1}

    def parse(self, raw: ReplayInput, tools: Sequence[ToolSpec]) -> ParseResult:
        return result_of(events_of(raw, [raw.text], tools))

    def parse_stream(
        self, raw: ReplayInput, chunks: Sequence[Sequence[int]], tools: Sequence[ToolSpec]
    ) -> ParseResult:
        pieces = self._pieces(raw)
        return self.parse_stream_text(
            raw, ["".join(pieces[unit] for unit in chunk) for chunk in chunks], tools
        )

    def parse_stream_text(
        self, raw: ReplayInput, deltas: Sequence[str], tools: Sequence[ToolSpec]
    ) -> ParseResult:
        return result_of(events_of(raw, deltas, tools))

    def _pieces(self, raw: ReplayInput) -> list[str]:
        """Characters, and the family's markers whole: what one token may be at least."""
        markers = sorted(load_families()[raw.family].markers, key=len, reverse=True)
        return re.findall("|".join(map(re.escape, markers)) + r"|[\s\S]", raw.text)
