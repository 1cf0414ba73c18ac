"""Clients as they were published, against a scripted deployment: `make test-clients`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.judges.clients.conftest import Program, Run
from tests.judges.clients.deployment import KNOWN, MODEL, Scripted, called, forced
from tests.judges.clients.table import Table

pytestmark = [pytest.mark.long, pytest.mark.clients]

HELLO = "Hello."
PERSON = {"name": "Ada", "age": 36}
WEATHER = "It is sunny."
AGAIN = "You said heron."

PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("openai", {
        "chat": HELLO,
        "chat, stream": HELLO,
        "chat, tools": WEATHER,
        "chat, tools, stream": WEATHER,
        "chat, parse": PERSON,
        "responses": HELLO,
        "responses, stream": HELLO,
        "responses, tools": WEATHER,
        "responses, parse": PERSON,
        "responses, previous_response_id": AGAIN,
    }),
    "anthropic": ("anthropic", {
        "messages": HELLO,
        "messages, stream": HELLO,
        "messages, tools": WEATHER,
        "messages, tools, stream": WEATHER,
        "messages, thinking": ["I ask.", "tool_use"],
        "messages, parse": PERSON,
        "messages, count_tokens": True,
    }),
    "langchain": ("LangChain", {
        "openai: stream": HELLO,
        "openai: bind_tools": WEATHER,
        "openai: with_structured_output, json_schema": PERSON,
        "openai: with_structured_output, json_mode": PERSON,
        "openai: with_structured_output, function_calling": PERSON,
        "openai: Responses, bind_tools": WEATHER,
        "openai: Responses, with_structured_output": PERSON,
        "openai: Responses, previous_response_id": AGAIN,
        "anthropic: stream": HELLO,
        "anthropic: bind_tools": WEATHER,
        "anthropic: with_structured_output, json_schema": PERSON,
        "anthropic: with_structured_output, function_calling": PERSON,
    }),
    "llama_index": ("LlamaIndex", {
        "openai: stream": HELLO,
        "openai: chat_with_tools": WEATHER,
        "openai: as_structured_llm": PERSON,
        "anthropic: stream": HELLO,
        "anthropic: chat_with_tools": WEATHER,
        "anthropic: as_structured_llm": PERSON,
    }),
    "pydantic_ai": ("Pydantic AI", {
        "chat: tools": WEATHER,
        "chat: output_type": PERSON,
        "chat: output_type, ToolOutput": PERSON,
        "chat: output_type, NativeOutput": PERSON,
        "chat: output_type, PromptedOutput": PERSON,
        "responses: tools": WEATHER,
        "responses: output_type": PERSON,
        "anthropic: tools": WEATHER,
        "anthropic: output_type": PERSON,
        "anthropic: output_type, PromptedOutput": PERSON,
    }),
    "agents_sdk": ("Agents SDK", {
        "by default: tools": WEATHER,
        "by default: output_type": PERSON,
        "by default: previous_response_id": AGAIN,
        "chat: tools": WEATHER,
        "chat: output_type": PERSON,
    }),
    "instructor": ("Instructor", {
        "openai: TOOLS": PERSON,
        "openai: TOOLS_STRICT": PERSON,
        "openai: PARALLEL_TOOLS": [PERSON],
        "openai: JSON": PERSON,
        "openai: JSON_SCHEMA": PERSON,
        "openai: MD_JSON": PERSON,
        "openai: RESPONSES_TOOLS": PERSON,
        "anthropic: TOOLS": PERSON,
        "anthropic: JSON": PERSON,
    }),
    "litellm": ("LiteLLM", {
        "openai: stream": HELLO,
        "openai: tools": WEATHER,
        "openai: response_format": PERSON,
        "anthropic: stream": HELLO,
        "anthropic: tools": WEATHER,
        "anthropic: response_format": PERSON,
    }),
    "llm": ("llm", {
        "prompt": HELLO,
        "tools": f"Let me look. {WEATHER}",
        "schema": PERSON,
    }),
    "vercel_ai": ("Vercel AI SDK", {
        f"{provider}: {ask}": wanted
        for provider in ("openai-compatible", "openai", "anthropic")
        for ask, wanted in (
            ("streamText", HELLO), ("generateText, tools", WEATHER), ("Output.object", PERSON),
        )
    }),
}  # fmt: skip
"""By environment: the client's name, and what each of its asks gives back."""
OLDER = {
    "openai_before": ("openai", "openai before 3"),
    "anthropic_before": ("anthropic", "anthropic before 2"),
}
"""Environments with an older version of a client, which does the same: that one's, its name."""


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    look = {"thought": "I ask.", "text": "Let me look."}
    tools = ("Person", "final_result", "json_tool_call", "json")
    answers = [
        ("sunny in Z", f"<think>\nSo it is.\n</think>\n{WEATHER}"),
        ("(again)", AGAIN),
        *((f'"name": "{name}"', called(name, PERSON)) for name in tools),
        *((f'"name": "{name}"', forced(name, PERSON)) for name in tools),
        ("(person)", json.dumps(PERSON)),
        ("(weather)", called("get_weather", {"city": "Zürich"}, **look)),
        ("", HELLO),
    ]
    with Scripted(tmp_path_factory.mktemp("scripted"), answers, [MODEL, KNOWN]) as running:
        yield running


@pytest.mark.parametrize("name", [*PROGRAMS, *OLDER])
def test_a_client_gives_back_what_the_script_says(
    name: str,
    installed: Callable[[str], Program],
    run: Run,
    scripted: Scripted,
    table: Table,
) -> None:
    same, client = OLDER[name] if name in OLDER else (name, PROGRAMS[name][0])
    expected = PROGRAMS[same][1]
    program = installed(name)
    before = len(scripted.answered())
    if same == "vercel_ai":
        script = Path(__file__).with_name("programs") / f"{same}_clients.mjs"
        interpreter = shutil.which("node") or "node"
        copied = program.folder / script.name  # packages are looked for beside it
        copied.write_text(script.read_text())
        script = copied
    else:
        script = Path(__file__).with_name("programs") / f"{same}_clients.py"
        interpreter = program.path("python")
    printed = run([interpreter, str(script), scripted.url, MODEL])
    lines = [line for line in printed.splitlines() if line.startswith('{"ask"')]
    said = {one.pop("ask"): one for one in map(json.loads, lines)}
    assert said == {ask: {"got": wanted} for ask, wanted in expected.items()}
    failed = [one for one in scripted.answered()[before:] if one.status != 200]
    assert not failed
    table.add(client, program.versions, dict.fromkeys(expected, "yes"))
