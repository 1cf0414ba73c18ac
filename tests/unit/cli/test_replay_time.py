"""An hour of 20,000 requests is replayed with a planner in under 15 s of CPU."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from commutator.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replay-planner.yaml"
REQUESTS = 20_000


@pytest.mark.slow
def test_an_hour_of_many_requests_is_planned_in_seconds(tmp_path: Path) -> None:
    chance, rows = random.Random(1), []
    times_ms = sorted(chance.uniform(0, 3_600_000) for _ in range(REQUESTS))
    for number, time_ms in enumerate(times_ms):
        tokens = min(4000, round(chance.expovariate(1 / 1155)) + 1)
        rows.append(
            {
                "timestamp": time_ms,
                "input_length": tokens,
                "output_length": chance.randrange(20, 400),
                "hash_ids": [number * 10 + block for block in range(-(-tokens // 512))],
            }
        )
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    began_s = time.process_time()
    done = CliRunner().invoke(main, ["replay", str(trace), str(EXAMPLE), "--plan", "--json"])
    took_s = time.process_time() - began_s
    assert done.exit_code == 0, done.output
    (report,) = json.loads(done.output)["planners"]
    print(f"{REQUESTS} requests in {took_s:.1f} s of CPU, {len(report['changes'])} changes")
    assert report["requests"] == REQUESTS
    assert report["changes"], "the planner did something"
    assert took_s < 15
