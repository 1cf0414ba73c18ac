"""Log-likelihoods as lm-eval asks for them, against transformers on the same weights.

With prefill elsewhere and a tier, after the prompt was computed for others: it is computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from tests.support.oracle import SOURCE, log_probabilities

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": SOURCE, "max_model_len": 1024}],
    "engines": [
        {"kind": "reference", "name": "p", "role": "prefill"},
        # Prompts take several steps.
        {"kind": "reference", "name": "d", "role": "decode", "max_tokens_per_step": 16},
    ],
    "tiers": [{"kind": "dram", "capacity": "100MB", "huge_pages": "off"}],
    "disaggregation": {"kind": "always", "timeout_s": 300},
}
PAIRS = [
    ("The capital of France is", " Paris, of course."),
    ("The capital of France is", " a banana."),
    ("Water boils at one hundred degrees, and it freezes at" * 3, " zero degrees. 😀"),
    ("Question: What is 2 + 2?\nAnswer:", " twenty-two"),  # where the answer ends at once
]
CLOSE = 1e-3


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with (
        LocalCluster(DEPLOYMENT, start_timeout_s=300) as running,
        httpx.Client(base_url=running.url, timeout=300) as made,
    ):
        yield made


def completed(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"model": "m", "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_they_are_those_of_transformers(client: httpx.Client) -> None:
    text = load_text_model(SOURCE)
    pairs = [(text.encode(before), text.encode(after)) for before, after in PAIRS]
    prompts = [[*before, *after] for before, after in pairs]
    completed(client, prompt=prompts, max_tokens=1)  # handed over, cached, and in the tier
    for most in (0, 1):
        told = completed(client, prompt=prompts, max_tokens=most, echo=True, logprobs=1)
        for choice, (before, after), ids in zip(told["choices"], pairs, prompts, strict=True):
            expected = log_probabilities(ids)
            known = choice["logprobs"]
            assert len(known["tokens"]) == len(ids) + most
            values = known["token_logprobs"][1 : len(ids)]
            wanted = [float(row[token]) for row, token in zip(expected, ids[1:], strict=False)]
            assert values == pytest.approx(wanted, abs=CLOSE)
            likelihood = sum(known["token_logprobs"][len(before) : len(ids)])
            assert likelihood == pytest.approx(sum(wanted[len(before) - 1 :]), abs=CLOSE * 8)
            assert len(after) > 1
            for row, top in zip(expected, known["top_logprobs"][1 : len(ids)], strict=False):
                best = text.token_text(int(torch.argmax(row)))
                assert top[best] == pytest.approx(float(row.max()), abs=CLOSE)
                assert max(top, key=top.__getitem__) == best


def test_prompt_logprobs_have_ranks(client: httpx.Client) -> None:
    text = load_text_model(SOURCE)
    ids = text.encode(PAIRS[0][0])
    (choice,) = completed(client, prompt=ids, max_tokens=1, prompt_logprobs=3)["choices"]
    expected = log_probabilities(ids)
    assert choice["prompt_logprobs"][0] is None
    for row, token, known in zip(expected, ids[1:], choice["prompt_logprobs"][1:], strict=False):
        assert known[str(token)]["rank"] == 1 + int((row > row[token]).sum())
        assert {*map(str, row.topk(3).indices.tolist())} <= known.keys()
