"""`commutator replay`: conversations over simulated workers, in virtual time."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from commutator.cli.main import main

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
EXAMPLE = EXAMPLES / "replay.yaml"
USERS, TURNS = 40, 6
OTHERS = ("round_robin", "random", "least_loaded", "power_of_two", "session_affinity")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each user asks again every 20 s or so, with two blocks more, which no other user shares."""
    chance = random.Random(3)
    lines = []
    for user in range(USERS):
        blocks = [user * 1000 + i for i in range(chance.randrange(5, 15))]
        for turn in range(TURNS):
            blocks += [user * 1000 + 500 + 2 * turn, user * 1000 + 501 + 2 * turn]
            time_ms = turn * 20_000 + chance.randrange(20_000)
            tokens = len(blocks) * 512 + chance.randrange(512)
            lines.append((time_ms, tokens, chance.randrange(20, 200), [*blocks, user * 1000 + 900]))
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("".join(json.dumps(dict(zip(names, line, strict=True))) + "\n"
                            for line in lines))  # fmt: skip
    return path


def replay(trace: Path, *arguments: str, file: Path = EXAMPLE) -> Result:
    return CliRunner().invoke(main, ["replay", str(trace), str(file), *arguments])


def figures(trace: Path, *arguments: str, file: Path = EXAMPLE) -> dict[str, dict[str, Any]]:
    done = replay(trace, "--json", *arguments, file=file)
    assert done.exit_code == 0, done.output
    return {one["policy"]: one for one in json.loads(done.output)["policies"]}


def test_kv_finds_more_in_the_caches_and_answers_sooner(trace: Path) -> None:
    found = figures(trace, "--workers", "4", "--compare", ",".join(("kv", *OTHERS)))
    assert list(found) == ["kv", *OTHERS]
    kv = found.pop("kv")
    assert kv["requests"] == USERS * TURNS
    for name, other in found.items():
        assert kv["cached_ratio"] > other["cached_ratio"], name
        assert kv["ttft_p50_s"] < other["ttft_p50_s"], name
        assert kv["ttft_p99_s"] < other["ttft_p99_s"], name
        assert kv["goodput_per_s"] >= other["goodput_per_s"], name


def test_one_endless_cache_finds_what_is_ideal(trace: Path) -> None:
    done = replay(trace, "--json", "--workers", "1", "--set", "engines[0].kv_capacity_blocks=99999")
    answer = json.loads(done.output)
    (kv,) = answer["policies"]
    assert answer["ideal_hit_ratio"] == pytest.approx(kv["cached_ratio"])
    assert (kv["imbalance"], kv["given_up_ratio"]) == (1.0, 0.0)


def test_with_endless_caches_only_balance_costs_reuse(trace: Path) -> None:
    sets = ("engines[0].kv_capacity_blocks=99999", "router.formula=cost")
    weight = "router.overlap_score_weight=0.1"
    options = (argument for one in (*sets, weight) for argument in ("--set", one))
    done = replay(trace, "--json", *options)
    answer = json.loads(done.output)
    (kv,) = answer["policies"]
    assert kv["given_up_ratio"] > 0
    lost = answer["ideal_hit_ratio"] - kv["cached_ratio"]
    assert lost == pytest.approx(kv["given_up_ratio"], abs=0.01)


def test_tiers_behind_the_device_find_what_it_forgot_and_their_policies_matter(
    trace: Path,
) -> None:
    small = ("--workers", "1", "--speed", "0.2", "--set", "engines[0].kv_capacity_blocks=60")
    tiered = EXAMPLES / "replay-tiers.yaml"

    def cached(file: Path, *more: str) -> float:
        sets = (argument for one in more for argument in ("--set", f"engines[0].tiers{one}"))
        return float(figures(trace, *small, *sets, file=file)["kv"]["cached_ratio"])

    little = ("[0].capacity_blocks=200", "[1].capacity_blocks=1")
    lru, s3fifo = (
        cached(tiered, *little, f"[0].eviction={{kind: {kind}}}") for kind in ("lru", "s3fifo")
    )
    assert cached(EXAMPLE) < min(lru, s3fifo)
    assert max(lru, s3fifo) < cached(tiered)
    assert lru != s3fifo


def test_equal_seeds_give_equal_answers(trace: Path) -> None:
    policies = ("--compare", "kv,random,power_of_two", "--json")
    first = replay(trace, *policies, "--seed", "7").output
    assert first == replay(trace, *policies, "--seed", "7").output
    assert first != replay(trace, *policies, "--seed", "8").output


def test_targets_decide_what_is_good(trace: Path) -> None:
    easy = figures(trace, "--target-ttft", "1000", "--target-itl", "1000")["kv"]
    hard = figures(trace, "--target-ttft", "0.5", "--target-itl", "0.02")["kv"]
    never = figures(trace, "--target-itl", "0.000001")["kv"]
    assert easy["goodput_per_s"] > hard["goodput_per_s"] > never["goodput_per_s"] == 0
    assert easy["goodput_per_s"] == pytest.approx(USERS * TURNS / 121, rel=0.05)


def test_more_workers_and_a_slower_trace_ease_the_load(trace: Path) -> None:
    few = figures(trace, "--workers", "2", "--policy", "least_loaded")["least_loaded"]
    many = figures(trace, "--workers", "6", "--policy", "least_loaded")["least_loaded"]
    slow = figures(trace, "--workers", "2", "--speed", "0.1", "--policy", "least_loaded")
    assert many["ttft_p99_s"] < few["ttft_p99_s"]
    assert slow["least_loaded"]["ttft_p99_s"] < few["ttft_p99_s"]


def test_the_table_and_the_plot(trace: Path, tmp_path: Path) -> None:
    for name in ("plot.svg", "plot.png", "plot.pdf"):
        done = replay(trace, "--requests", "60", "--compare", "session_affinity,kv,random",
                      "--plot", str(tmp_path / name))  # fmt: skip
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 1000
    table = done.output
    assert "an infinite one would find" in table
    for heading in ("policy", "cached", "given up", "TTFT p50", "ITL p50", "imbalance", "goodput"):
        assert heading in table
    assert "…" not in table, "it fits 80 columns"
    assert {"kv", "random"} <= set(table.split())


@pytest.mark.parametrize("name", ["plot.foo", "plot", "missing/plot.svg", "folder.svg"])
def test_a_plot_that_cannot_be_written_is_reported_before_the_replay(
    trace: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the trace was read")

    monkeypatch.setattr("commutator_replay.cli.load_trace", never)
    (tmp_path / "folder.svg").mkdir()
    done = replay(trace, "--plot", str(tmp_path / name))
    assert done.exit_code == 2, done.output
    assert "--plot" in done.output
    assert name in done.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--policy", "clairvoyant"], 1, "--policy: 1 problem"),
        (["--policy", "clairvoyant"], 1, 'no routing policy "clairvoyant"; there are'),
        (["--compare", "kv,clairvoyant"], 1, "--compare: 1 problem"),
        (["--compare", "kv,pipeline"], 1, "pipeline needs options (scorers): make it the router"),
        (["--policy", "kv", "--compare", "kv"], 2, "give one of"),
        (["--speed", "0"], 2, "--speed"),
        (["--set", "engines[0].block_size=100"], 1, "set block_size: 512"),
        (["--set", "engines[0].kv_capacity_blocks=3"], 1, "KV blocks; there are 3"),
    ],
)
def test_what_cannot_work_is_said(
    trace: Path, arguments: list[str], code: int, message: str
) -> None:
    done = replay(trace, *arguments)
    assert done.exit_code == code
    assert message in done.output


def test_every_policy_is_looked_up_before_one_runs(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a policy ran")

    monkeypatch.setattr("commutator_replay.setup.replay", never)
    for name in ("nonsense", "pipeline"):
        done = replay(trace, "--compare", f"kv, {name}")
        assert done.exit_code == 1
        assert name in done.output


def test_names_may_have_spaces_around_them(trace: Path) -> None:
    found = figures(trace, "--requests", "20", "--compare", "kv, round_robin , random")
    assert list(found) == ["kv", "round_robin", "random"]


def test_a_policy_whose_options_are_required_is_compared_when_it_is_the_files(
    trace: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load(EXAMPLE.read_text())
    config["router"] = {"kind": "pipeline", "scorers": [{"kind": "prefix"}]}
    file = tmp_path / "pipeline.yaml"
    file.write_text(yaml.safe_dump(config))
    found = figures(trace, "--requests", "60", "--compare", "random,pipeline", file=file)
    assert found["pipeline"]["cached_ratio"] > found["random"]["cached_ratio"]


def test_an_engine_without_a_model_in_virtual_time_is_refused(trace: Path, tmp_path: Path) -> None:
    real = tmp_path / "real.yaml"
    real.write_text("models: [{name: m, source: package:m}]\nengines: [{kind: reference}]\n")
    done = CliRunner().invoke(main, ["replay", str(trace), str(real)])
    assert done.exit_code == 1
    assert "use sim" in done.output
