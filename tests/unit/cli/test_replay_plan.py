"""`commutator replay --plan`: workers come and go in virtual time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.contract.worker import Role
from commutator_replay.clairvoyant import Schedule

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "replay-planner.yaml"
MINUTES = 24


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Calm for 6 minutes, four times as much for 6, calm again."""
    chance = random.Random(8)
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    write(path, chance, lambda minute: 6.0 if 6 <= minute < 12 else 1.5)
    return path


def write(path: Path, chance: random.Random, rate: Any) -> None:
    time_s, rows = 0.0, list[dict[str, Any]]()
    while time_s < 60 * MINUTES:
        time_s += chance.expovariate(rate(time_s // 60))
        tokens = chance.randrange(1000, 3000)
        rows.append(
            {
                "timestamp": time_s * 1000,
                "input_length": tokens,
                "output_length": chance.randrange(20, 60),
                "hash_ids": [len(rows) * 10 + block for block in range(-(-tokens // 512))],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def replay(trace: Path, *arguments: str, file: Path = EXAMPLE) -> Result:
    return CliRunner().invoke(main, ["replay", str(trace), str(file), *arguments])


def planned(trace: Path, *arguments: str, file: Path = EXAMPLE) -> dict[str, dict[str, Any]]:
    done = replay(trace, "--json", *arguments, file=file)
    assert done.exit_code == 0, done.output
    return {one["planner"]: one for one in json.loads(done.output)["planners"]}


FAST = (
    *("--set", "planner.start_up_s=30", "--set", "planner.targets.ttft_s=1.0"),
    *("--set", "engines[0].replicas=2"),
)


FEW = ("--set", "planner.bounds.both=[1, 8]")


def test_the_fleet_follows_the_load_and_every_request_is_answered(trace: Path) -> None:
    (one,) = planned(trace, "--plan", *FAST).values()
    assert one["requests"] == len(trace.read_text().splitlines())
    samples = one["samples"]

    def ready(first: float, last: float) -> list[int]:
        return [s["ready"] for s in samples if first * 60 <= s["time_s"] < last * 60]

    assert max(ready(0, 6)) < max(ready(8, 12)) == one["most_workers"]
    assert min(ready(16, 22)) < one["most_workers"], "and back, after the hold"
    assert one["attained"] > 0.9
    billed = sum(sample["ready"] for sample in samples) * 5 / 3600
    assert one["worker_hours"] == pytest.approx(billed, rel=0.1)
    assert one["worker_hours"] >= billed * 0.99, "start-up and drain are billed, too"


def test_a_longer_start_up_costs_attainment(trace: Path) -> None:
    quick, slow = (
        planned(trace, "--plan", *FAST, "--set", f"planner.start_up_s={seconds}")["slo"]
        for seconds in (5, 240)
    )
    assert quick["attained_ttft"] > slow["attained_ttft"]


def test_planners_are_compared_side_by_side(trace: Path) -> None:
    found = planned(trace, "--compare-planners", "ours,fixed,fixed:1,clairvoyant", *FAST, *FEW)
    smallest = next(name for name in found if name not in {"ours", "fixed:1", "clairvoyant"})
    assert found[smallest]["attained"] >= 0.95 > found["fixed:1"]["attained"]
    assert found[smallest]["flips"] == found["fixed:1"]["flips"] == 0
    assert found["ours"]["worker_hours"] < found[smallest]["worker_hours"]
    assert found["clairvoyant"]["attained"] >= 0.95
    assert found["clairvoyant"]["worker_hours"] < found["ours"]["worker_hours"]


def test_equal_seeds_give_equal_plans(trace: Path) -> None:
    few = ("--plan", "--requests", "1500", "--json", *FAST)
    assert replay(trace, *few).output == replay(trace, *few).output


def test_each_change_is_explained(trace: Path) -> None:
    done = replay(trace, "--plan", *FAST)
    assert done.exit_code == 0
    lines = [line for line in done.output.splitlines() if " both: need " in line]
    assert any("+" in line and "growth" in line for line in lines)
    assert any("were needed in the last 180 s" in line for line in lines)
    assert "worker-hours" in done.output


def test_a_fleet_of_none_wakes_for_the_first_request(tmp_path: Path) -> None:
    """Two requests an hour apart: each waits for a worker, or finds one; none is lost."""
    path = tmp_path / "rare.jsonl"
    path.write_text(
        "".join(
            json.dumps(
                {"timestamp": ms, "input_length": 100, "output_length": 10, "hash_ids": [ms]}
            )
            + "\n"
            for ms in (0, 3_600_000, 3_601_000)
        )
    )
    options = ("--set", "planner.bounds.both=[0, 4]", "--set", "planner.start_up_s=60")
    (one,) = planned(path, "--plan", *options, "--set", "engines[0].replicas=1").values()
    assert one["requests"] == 3
    assert min(sample["ready"] for sample in one["samples"]) == 0
    assert 60 < one["ttft_p99_s"] < 60 + 6, "start-up, at most a plan's interval, and the prompt"
    assert one["worker_hours"] < 0.4, "for an hour of the trace"


def test_prefill_and_decode_workers_are_planned_apart(tmp_path: Path) -> None:
    chance, path = random.Random(2), tmp_path / "long.jsonl"
    rows = []
    for number in range(300):
        tokens = chance.randrange(4_000, 12_000)
        rows.append(
            {
                "timestamp": number * 1500.0,
                "input_length": tokens,
                "output_length": chance.randrange(50, 300),
                "hash_ids": [number * 100 + block for block in range(-(-tokens // 512))],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planner = "{kind: slo, start_up_s: 20, targets: {ttft_s: 3.0}, bounds: {prefill: [0, 8]}}"
    arguments = ("--plan", "--set", f"planner={planner}")
    file = EXAMPLES / "replay-disagg.yaml"
    (one,) = planned(path, *arguments, file=file).values()
    assert one["requests"] == 300
    assert one["worker_hours_by_role"].keys() == {"prefill", "decode"}
    assert {change["role"] for change in one["changes"]} == {"prefill", "decode"}
    assert one["attained_ttft"] > 0.9


def test_workers_change_their_role_with_the_load(tmp_path: Path) -> None:
    """Long prompts with short answers, then short prompts with long answers, within a budget."""
    chance, path, rows = random.Random(2), tmp_path / "turns.jsonl", list[dict[str, Any]]()
    for number in range(480):
        long = number < 240
        tokens = chance.randrange(8_000, 12_000) if long else chance.randrange(400, 600)
        rows.append(
            {
                "timestamp": number * 1500.0,
                "input_length": tokens,
                "output_length": 10 if long else 900,
                "hash_ids": [number * 100 + block for block in range(-(-tokens // 512))],
            }
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    planner = (
        "{kind: slo, start_up_s: 60, hold_s: 30, targets: {ttft_s: 3.0, itl_s: 0.0085}, "
        "bounds: {prefill: [1, 2], decode: [1, 2]}, budget: {workers: 3}}"
    )
    first = ("--set", "engines[0].replicas=1", "--set", "engines[1].replicas=2")
    arguments = ("--plan", "--set", f"planner={planner}", *first)
    (one,) = planned(path, *arguments, file=EXAMPLES / "replay-disagg.yaml").values()
    assert one["requests"] == 480
    assert one["role_changes"] > 0
    total = sum(one["worker_hours_by_role"].values())
    assert total == pytest.approx(one["worker_hours"])


def test_a_picture_shows_demand_and_workers(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    done = replay(trace, "--plan", "--requests", "500", "--plot", str(picture))
    assert done.exit_code == 0, done.output
    text = picture.read_text()
    assert "workers" in text
    assert "requests/s" in text
    assert "in time, %" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--plan", "--compare-planners", "slo"), "not both"),
        (("--plan", "--policy", "kv"), "the file's own policies"),
        (("--plan", "--speed", "2"), "compress the trace"),
        (("--plan", "--target-ttft", "1"), "its own targets"),
        (("--compare-planners", "slo,none"), 'no planner "none"; there are slo, ours, fixed,'),
        (("--compare-planners", "fixed:0"), "expected fixed:N"),
        (("--compare-planners", "clairvoyant:3"), 'no planner "clairvoyant:3"'),
        (
            ("--plan", "--set", "planner.budget.workers=2", "--set", "planner.bounds.both=[3, 4]"),
            "2 is less than the 3",
        ),
        (("--plan", "--set", "planner.bounds.both=[4, 3]"), "the fewest and the most workers"),
        (("--plan", "--set", "planner.bounds.decode=[1, 2]"), "no worker has this role"),
        (("--plan", "--set", "planner.speed=4"), "unknown key"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    trace: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = replay(trace, *arguments)
    assert done.exit_code != 0
    assert message in " ".join(done.output.split()) or message in str(done.exception)


def test_a_file_without_a_planner_cannot_be_planned(trace: Path) -> None:
    done = replay(trace, "--plan", file=EXAMPLES / "replay.yaml")
    assert done.exit_code != 0
    assert "planner: required to plan a replay" in str(done.exception) + done.output


def test_without_the_option_the_fleet_stays_and_a_warning_says_so(trace: Path) -> None:
    done = replay(trace, "--requests", "50")
    assert done.exit_code == 0
    assert "planner: without --plan the fleet stays as it is" in done.output


def test_what_is_replayed_can_be_served(trace: Path) -> None:
    done = CliRunner().invoke(main, ["config", "check", str(EXAMPLE)])
    assert done.exit_code == 0, done.output


def test_a_schedule_has_workers_ready_when_they_are_needed() -> None:
    work = [1.0] * 600 + [4.0] * 600 + [1.0] * 600
    schedule = Schedule(Role.BOTH, 1.0, work, 115.0)
    assert schedule.workers_at(0.0) == 2, "1 + sqrt(1)"
    assert schedule.workers_at(479.0) == 2
    assert schedule.workers_at(480.0) == 6, "4 + sqrt(4), two minutes ahead"
    assert schedule.workers_at(1100.0) == 6
    assert schedule.workers_at(1320.0) == 2
