"""`lm-eval` as it was published, against the reference engine: `make test-clients`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.judges.clients.conftest import Program, Run
from tests.judges.clients.deployment import write_tokenizer
from tests.judges.clients.table import Table
from tests.support.oracle import SOURCE, log_probabilities

from commutator.tokenizer import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.clients]

QUESTIONS = {
    "What is the capital of France?": ["Paris", "Rome", "a river in the north"],
    "What is 2 + 2?": ["4", "5", "twenty-two"],
    "Which animal barks?": ["the dog", "the fish", "a cat at night"],
}
TASK = """
task: places
dataset_path: json
dataset_kwargs: {data_files: {test: "%s"}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc}]
"""
CLOSE = 1e-3


def test_loglikelihoods_are_those_of_transformers(
    installed: Callable[[str], Program], run: Run, table: Table, tmp_path: Path
) -> None:
    program, tasks, results = installed("lm_eval"), tmp_path / "tasks", tmp_path / "results"
    tasks.mkdir()
    lines = [
        json.dumps({"question": question, "choices": choices})
        for question, choices in QUESTIONS.items()
    ]
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(lines))
    (tasks / "places.yaml").write_text(TASK % data)
    log = tmp_path / "requests.jsonl"
    config = {
        "models": [{"name": "m", "source": SOURCE}],
        "engines": [{"kind": "reference", "kv_cache_bytes": 64 << 20}],
        "observers": [{"kind": "audit", "path": str(log)}],
    }
    with LocalCluster(config) as running:
        options = f"model=m,base_url={running.url}/v1/completions,num_concurrent=1"
        options += f",tokenizer={write_tokenizer(tmp_path / 'tokenizer')}"
        run(
            [
                *(program.path("lm_eval"), "run", "--model", "local-completions"),
                *("--model_args", options, "--include_path", str(tasks), "--tasks", "places"),
                *("--batch_size", "4", "--log_samples", "--output_path", str(results)),
            ]
        )
    files = tmp_path.glob("requests*.jsonl")
    asked = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    completions = [one["status"] for one in asked if one["path"] == "/v1/completions"]
    assert completions
    assert set(completions) == {200}
    text = load_text_model(SOURCE)
    (file,) = results.rglob("samples_places*.jsonl")
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        before = f"Question: {question}\nAnswer:"
        context = text.encode(before, add_special_tokens=False)
        for choice, (said,) in zip(choices, sample["resps"], strict=True):
            whole = text.encode(f"{before} {choice}", add_special_tokens=False)
            after = log_probabilities([*whole])[len(context) - 1 : -1]
            targets = torch.tensor(whole[len(context) :])
            value = float(after.gather(1, targets[:, None]).sum())
            assert float(said[0]) == pytest.approx(value, abs=CLOSE)
            assert str(said[1]) == str(bool((after.argmax(dim=-1) == targets).all()))
    result = "yes; by the reference engine, within 1e-3 of transformers"
    table.add("lm-eval", program.versions, {"local-completions, log-likelihoods": result})
