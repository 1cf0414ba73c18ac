# ruff: noqa: RUF001 - markers are what they are
"""Calls that are rendered by real chat templates are parsed back to what was rendered."""

from __future__ import annotations

import json
import random
import re
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve, frozen

from commutator.contract.answer import (
    AnswerEvent,
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    ReasoningContent,
)
from commutator.contract.conversation import Conversation, Message, Tool
from commutator.contract.parser import Parser, ParserConfig, ParserModel
from commutator.errors import RequestError
from commutator.tokenizer.text_model import ChatTemplate
from commutator_parsers.model import ModelParser

pytestmark = pytest.mark.long

CASES = 40
"""Cases for each template."""
ENDS: tuple[str, ...] = (
    "<EOS>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<seed:eos>",
    "[e~[",
)
ENDS += (
    "<｜end▁of▁sentence｜>",
    "<end_of_sentence>",
    "<turn|>",
    "<|tool_response>",
    "<|role_end|>",
)
ENDS += ("<|END_OF_TURN_TOKEN|>", "<|end_of_msg|>", "<SPECIAL_12>", "</assistant>", "<sep>")
ENDS += ("<|call|>", "<|return|>", "<|assistant_end|>", "<｜hy_eos:opensource｜>", "<|calls|>")
ENDS += ("<|message_sep|>", "<|end|>", "<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>")
ENDS += ("<|START_OF_TURN_TOKEN|>",)
ENDS += ("<｜Assistant｜>",)
PROMPT_BEGINS_THINKING = {"Apriel-1.6-15b-Thinker-fixed"}
"""Where history has no marker before the reasoning, which the prompt has."""
NO_THINKING = {"NVIDIA-Nemotron-Nano-v2"}
"""History has no reasoning."""
ONE_CALL = {"GigaChat3-10B-A1.8B", "GigaChat3.1-10B-A1.8B", "openai-gpt-oss-120b"}
"""They render the first call alone."""
CALLS_ALONE = {"NVIDIA-Nemotron-Nano-v2", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B"}
CALLS_ALONE |= {"openai-gpt-oss-120b"}
"""They render text beside calls elsewhere."""
UNESCAPED = {"LFM2.5-8B-A1B"}
"""They render quotes and backslashes within quotes as they are."""
WITHOUT_CALLS = {
    "HuggingFaceTB-SmolLM3-3B": "takes its tools from a variable of its own",
    "LFM2-8B-A1B": "does not render calls",
    "LFM2.5-Instruct": "does not render calls",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "does not render calls",
    "fireworks-ai-llama-3-firefunction-v2": "takes its tools from a variable of its own",
    "google-gemma-2-2b-it": "knows no tools",
    "llama-cpp-rwkv-world": "knows no tools",
    "microsoft-Phi-3.5-mini-instruct": "knows no tools",
    "ibm-granite-granite-3.3-2B-Instruct": "does not render calls",
    "CohereForAI-c4ai-command-r-plus-tool_use": "its prompts end with instructions",
    "llama-cpp-deepseek-r1": "renders calls of several turns only",
}
UNKNOWN = {
    "meetkai-functionary-medium-v3.2": "its recipients are not read yet",
    "muse-glimmer": "its recipients are not read yet",
}
WORDS: tuple[str, ...] = (
    "the",
    "a",
    "Zürich",
    "東京",
    "🌸",
    "x < y",
    "a & b",
    '"quoted"',
    "it's",
    "{",
    "}",
    "[1]",
    "#1;",
)
WORDS += (
    "back\\slash",
    "C:\\new",
    "tab\there",
    "line\nline",
    "  two",
    "\\u00e9",
    "%s",
    "<b>",
    "</b>",
)
MARKERS: tuple[str, ...] = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "[TOOL_CALLS]",
    "<function=x>",
    "</function>",
)
MARKERS += (
    "<parameter=path>",
    "</parameter>",
    "<arg_key>",
    "<|tool_call>",
    "<|python_tag|>",
    "```json",
)
MARKERS += (
    '{"name": "get_weather", "arguments": {}}',
    "<｜tool▁sep｜>",
    "<|channel|>",
    "functools[",
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does it.",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in {
        "get_weather": {
            "city": {"type": "string", "description": "Where."},
            "days": {"type": "integer", "description": "How many."},
        },
        "write-file": {
            "path": {"type": "string", "description": "Where."},
            "content": {"type": "string", "description": "What."},
            "mode": {"type": "number", "description": "How."},
            "sure": {"type": "boolean", "description": "Really."},
        },
        "search_2": {
            "query": {"type": "string", "description": "What."},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "With."},
            "filters": {
                "type": "object",
                "properties": {
                    "min": {"type": "integer"},
                    "deep": {"type": "object", "properties": {"word": {"type": "string"}}},
                },
                "additionalProperties": {"type": "string"},
                "description": "Which.",
            },
        },
        "get_time": {},
    }.items()
]


@frozen(kw_only=True)
class Said:
    """What an answer says."""

    reasoning: str | None
    content: str | None
    calls: tuple[tuple[str, str], ...]


def text_of(draw: random.Random, *, markers: bool) -> str:
    words = [draw.choice(WORDS) for _ in range(draw.randint(1, 6))]
    if markers and draw.random() < 0.5:
        words.insert(draw.randint(0, len(words)), f"about {draw.choice(MARKERS)} and")
    return " ".join(words).strip()


def value_of(draw: random.Random, schema: Mapping[str, Any]) -> object:
    match schema["type"]:
        case "string":
            return text_of(draw, markers=True)
        case "integer":
            return draw.randint(-5, 10**12)
        case "number":
            return draw.choice([0.5, -2.25, 3, 1e-7])
        case "boolean":
            return draw.random() < 0.5
        case "array":
            return [text_of(draw, markers=True) for _ in range(draw.randint(1, 3))]
    return {name: value_of(draw, one) for name, one in schema["properties"].items()}


def case_of(draw: random.Random, name: str) -> Said:
    """One that the template ``name`` renders."""
    said = any_case(draw)
    if name in UNESCAPED:
        calls = [(tool, text.replace("\\\\", "/").replace("'", "")) for tool, text in said.calls]
        said = evolve(said, calls=tuple(calls))
    if name in ONE_CALL:
        said = evolve(said, calls=said.calls[:1])
    if name in CALLS_ALONE and said.calls:
        said = evolve(said, content=None)
    if name in PROMPT_BEGINS_THINKING and said.reasoning is None:
        said = evolve(said, reasoning="I think")
    return said


def any_case(draw: random.Random) -> Said:
    calls = []
    for _ in range(draw.choice([0, 1, 1, 2])):
        function = draw.choice(TOOLS)["function"]
        properties = function["parameters"]["properties"]
        chosen = [key for key in properties if draw.random() < 0.8]
        arguments = {key: value_of(draw, properties[key]) for key in chosen}
        calls.append((function["name"], json.dumps(arguments, ensure_ascii=False)))
    return Said(
        reasoning=f"I think {draw.randint(0, 9999)} of it" if draw.random() < 0.5 else None,
        content=f"Say {text_of(draw, markers=False)} so"
        if not calls or draw.random() < 0.4
        else None,
        calls=tuple(calls),
    )


def messages_of(said: Said, *, as_object: bool) -> list[dict[str, Any]]:
    assistant: dict[str, Any] = {"role": "assistant", "content": said.content or ""}
    if said.reasoning is not None:
        assistant |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), said.reasoning)
    if said.calls:
        assistant["tool_calls"] = [
            {
                "id": "".join(random.choices(string.ascii_letters, k=9)),
                "type": "function",
                "function": {"name": name, "arguments": json.loads(text) if as_object else text},
            }
            for name, text in said.calls
        ]
    return [{"role": "user", "content": "hello"}, assistant]


def rendered(template: ChatTemplate, said: Said) -> tuple[str, str]:
    """(the prompt's end, the answer), as a model would have them; raises RequestError."""
    variables = {"tools": TOOLS, "keep_reasoning": True, "enable_thinking": True, "thinking": True}
    if said.reasoning is None:
        variables |= {"enable_thinking": False, "thinking": False}
    for as_object in (True, False):
        messages = messages_of(said, as_object=as_object)
        try:
            whole = template.render(messages, add_generation_prompt=False, variables=variables)
            break
        except RequestError:
            if not as_object:
                raise
    prompt = template.render(messages[:1], add_generation_prompt=True, variables=variables)
    same = beginning_of_both(whole, prompt)
    if len(same) < len(prompt):  # the prompt ends with what thinks, and the history does not
        prompt = re.sub(r"[<\[][^>\]]*\Z", "", same)
    answer = whole[len(prompt) :]
    stripped = True
    while stripped:
        stripped = False
        answer = answer.rstrip("\n")
        for end in ENDS:
            if answer.endswith(end):
                answer, stripped = answer[: -len(end)], True
    return prompt[-64:], answer


def beginning_of_both(one: str, other: str) -> str:
    ends = (place for place, pair in enumerate(zip(one, other, strict=False)) if len({*pair}) > 1)
    return one[: next(ends, min(len(one), len(other)))]


def what_is_there(said: Said, answer: str) -> Said:
    """Templates leave out what they do not render."""
    content = said.content if said.content is not None and said.content in answer else None
    reasoning = said.reasoning if said.reasoning is not None and said.reasoning in answer else None
    return evolve(said, content=content, reasoning=reasoning)


def parsed(parser: Parser, prompt_end: str, pieces: list[str]) -> Said:
    conversation = Conversation(
        messages=[Message(role="user", content="hello")],
        tools=[
            Tool(name=tool["function"]["name"], parameters=tool["function"]["parameters"])
            for tool in TOOLS
        ],
    )
    reader = parser.answer(conversation, prompt_end)
    if reader is None:
        return Said(reasoning=None, content="".join(pieces), calls=())
    events: list[AnswerEvent] = []
    for piece in pieces:
        events += reader.feed(piece)
    last, _ = reader.finish("stop")
    return said_of([*events, *last])


def said_of(events: list[AnswerEvent]) -> Said:
    ended = [event.call for event in events if isinstance(event, CallEnd)]
    names = {event.call: event.name for event in events if isinstance(event, CallStart)}
    content = "".join(event.text for event in events if isinstance(event, Content))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningContent))
    arguments = {
        call: "".join(
            event.text
            for event in events
            if isinstance(event, CallArguments) and event.call == call
        )
        for call in ended
    }
    return Said(
        reasoning=reasoning.strip() or None,
        content=content.strip() or None,
        calls=tuple((names[call], arguments[call]) for call in ended),
    )


def cut(draw: random.Random, text: str) -> list[str]:
    pieces = []
    while text:
        length = draw.randint(1, 8)
        pieces.append(text[:length])
        text = text[length:]
    return pieces


def test_calls_in_real_templates_are_parsed_back(judges: Path) -> None:
    files = sorted((judges / "templates").glob("*.jinja"))
    checked = sum(
        check(file) for file in files if file.stem not in WITHOUT_CALLS and file.stem not in UNKNOWN
    )
    assert len(files) >= 70
    assert checked >= 2000


def check(file: Path) -> int:
    """Check the cases of one template; returns how many."""
    source = file.read_text()
    template = ChatTemplate(source, {"bos_token": "<BOS>", "eos_token": "<EOS>"})
    model = ParserModel(name=file.stem, chat_template=source, special_tokens={}, reasoning="auto")
    parser = ModelParser(ParserConfig(kind="auto"), model)
    assert parser.reads_calls
    draw = random.Random(file.stem)
    checked = 0
    while checked < CASES:
        said = case_of(draw, file.stem)
        try:
            prompt_end, answer = rendered(template, said)
        except RequestError:  # such as two calls, where the template writes one
            said = evolve(said, calls=said.calls[:1], content=None if said.calls else said.content)
            if said.calls:
                said = evolve(said, reasoning=None)
            prompt_end, answer = rendered(template, said)
        checked += 1
        if file.stem in PROMPT_BEGINS_THINKING:
            prompt_end = "Here are my reasoning steps:\n"
        if file.stem in NO_THINKING:
            prompt_end = ""
        expected = what_is_there(said, answer)
        for pieces in ([answer], list(answer), cut(draw, answer)):
            found = parsed(parser, prompt_end, pieces)
            what = (prompt_end, answer)
            assert [(name, json.loads(text)) for name, text in found.calls] == [
                (name, json.loads(text)) for name, text in expected.calls
            ], what
            assert found.content == expected.content, what
            assert found.reasoning == expected.reasoning, what
    return checked
