"""`commutator planner search` finds a placement that can be served."""

from __future__ import annotations

import json
import random
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from click.testing import CliRunner

from commutator.cli import added
from commutator.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "replay-disagg.yaml"


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    chance, time_s = random.Random(3), 0.0
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    rows = []
    for number in range(60):
        time_s += chance.expovariate(2.0)
        tokens = chance.randrange(500, 1500)
        ids = [number * 10 + block for block in range(-(-tokens // 512))]
        rows.append(
            {
                "timestamp": time_s * 1000,
                "input_length": tokens,
                "output_length": chance.randrange(20, 60),
                "hash_ids": ids,
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_the_placement_found_can_be_checked_and_replayed(trace: Path, tmp_path: Path) -> None:
    made = tmp_path / "placement.yaml"
    arguments = ["--workers", "3", "--knob", "disaggregation.max_local_prefill_length=200"]
    done = CliRunner().invoke(
        main, ["planner", "search", str(trace), str(EXAMPLE), *arguments, "--output", str(made)]
    )
    assert done.exit_code == 0, done.output
    assert "the fewest that are enough" in done.output
    assert "the best" in done.output
    assert "engines:" in done.output
    checked = CliRunner().invoke(main, ["config", "check", str(EXAMPLE), str(made)])
    assert checked.exit_code == 0, checked.output
    assert "planner search" in made.read_text()


def test_json_has_all_that_was_tried(trace: Path) -> None:
    arguments = ["--workers", "2", "--json", "--requests", "40", "--disagg", "always"]
    done = CliRunner().invoke(main, ["planner", "search", str(trace), str(EXAMPLE), *arguments])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    tried = {one["layout"].partition(", router")[0] for one in found["looks"]}
    assert tried == {"2 both", "1 prefill + 1 decode, always"}
    assert sum(e["replicas"] for e in found["changes"]["engines"]) == 2
    assert found["front"][-1]["workers"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "0"), "0"),
        (("--workers", "2", "--disagg", "none"), 'no disaggregation policy "none"'),
        (("--workers", "2", "--knob", "router"), "expected SECTION.OPTION=V1,V2,..."),
    ],
)
def test_what_cannot_be_searched_is_refused(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = CliRunner().invoke(main, ["planner", "search", str(trace), str(EXAMPLE), *arguments])
    assert done.exit_code != 0
    assert message in " ".join(done.output.split()) or message in str(done.exception)


def test_without_its_package_an_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    slo = EntryPoint("planner", "commutator_slo.commands", added.GROUP)
    monkeypatch.setattr(added, "entry_points", lambda group: [slo])
    done = CliRunner().invoke(main, ["planner", "search"])
    assert done.exit_code != 0
    assert "search comes with commutator-replay: pip install commutator-replay" in done.output
    shown = CliRunner().invoke(main, ["planner", "--help"])
    assert "search" not in shown.output
    assert "status" in shown.output
    monkeypatch.setattr(added, "entry_points", lambda group: [])
    done = CliRunner().invoke(main, ["planner", "status"])
    assert "planner comes with commutator-slo: pip install commutator-slo" in done.output
