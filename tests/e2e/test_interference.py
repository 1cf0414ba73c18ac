"""Long prompts among short chats, in virtual time: what it is worth to prefill elsewhere."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commutator.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "replay-disagg.yaml"
POLICIES = ("aggregated", "always", "conditional")
REQUESTS = 120


def write_trace(path: Path) -> None:
    """Prompts of 1,000 to 30,000 tokens, most of them towards the lower end."""
    chance = random.Random(11)
    with path.open("w") as file:
        for number in range(REQUESTS):
            tokens = min(30_000, 1_000 + int(chance.expovariate(1 / 8_000)))
            blocks = [number * 100 + block for block in range(tokens // 512 + 1)]
            row = {
                "timestamp": number * 1000 + chance.randrange(1000),
                "input_length": tokens,
                "output_length": chance.randrange(50, 500),
                "hash_ids": blocks,
            }
            file.write(json.dumps(row) + "\n")


@pytest.mark.slow
def test_the_condition_is_as_good_as_the_better_way_at_every_rate(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl")
    arguments = ("--chats", "3", "--target-ttft", "0.5", "--rates", "2,12,22")
    done = CliRunner().invoke(
        main,
        ["replay", str(tmp_path / "trace.jsonl"), str(EXAMPLE), "--disagg", ",".join(POLICIES),
         *arguments, "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    calmer = False
    for row in json.loads(done.output)["rates"]:
        found: dict[str, Any] = {one["policy"]: one for one in row["policies"]}
        good = {name: one["good_ratio"] for name, one in found.items()}
        better = max(good["aggregated"], good["always"])
        # A prompt that takes 499 ms by itself has no time for a hand-over.
        assert good["conditional"] >= better - 0.01, (row["rate"], good)
        calmer |= found["always"]["itl_p99_s"] < found["aggregated"]["itl_p99_s"] / 2
    assert good["conditional"] > better + 0.05, "under the highest load it is far better"
    assert calmer, "apart, prompts delay no answers"
