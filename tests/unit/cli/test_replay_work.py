"""A replay with a planner works as much for each of many requests as for each of few."""

from __future__ import annotations

import json
import random
from pathlib import Path

from click.testing import CliRunner
from tests.support.work import calls_of

from commutator.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replay-planner.yaml"


def write_trace(path: Path, requests: int) -> None:
    """Five or six requests a second, however many there are."""
    chance = random.Random(1)
    times_ms = sorted(chance.uniform(0, requests * 180) for _ in range(requests))
    rows = []
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
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_four_times_the_requests_are_four_times_the_work(tmp_path: Path) -> None:
    def calls(requests: int) -> int:
        trace = tmp_path / f"{requests}.jsonl"
        write_trace(trace, requests)

        def replay() -> None:
            done = CliRunner().invoke(
                main, ["replay", str(trace), str(EXAMPLE), "--plan", "--json"]
            )
            assert done.exit_code == 0, done.output
            (report,) = json.loads(done.output)["planners"]
            assert report["requests"] == requests
            assert report["changes"] or requests < 1_000, "the planner did something"

        return calls_of(replay)

    calls(100)  # what is imported and compiled on the first run
    few, many = calls(1_000), calls(4_000)
    print(few, many)
    assert many < 5 * few
