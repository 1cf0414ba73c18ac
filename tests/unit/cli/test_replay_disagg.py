"""`commutator replay` with prefill and decode apart."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from attrs import frozen
from click.testing import CliRunner, Result

from commutator.cli.main import main
from commutator.config.load import load_config
from commutator.contract.disagg import DisaggregationConfig
from commutator.contract.planner import PlannerTargets
from commutator.contract.registration import Origin
from commutator.contract.settings import setting
from commutator.errors import ConfigError
from commutator_replay.setup import Replays

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "replay-disagg.yaml"
POLICIES = ("aggregated", "always", "conditional")
REQUESTS = 40


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long prompts without shared prefixes."""
    chance = random.Random(5)
    path = tmp_path_factory.mktemp("trace") / "long.jsonl"
    rows = [
        {
            "timestamp": number * 500,
            "input_length": (tokens := chance.randrange(4_000, 16_000)),
            "output_length": chance.randrange(50, 300),
            "hash_ids": [number * 1000 + block for block in range(tokens // 512 + 1)],
        }
        for number in range(REQUESTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def replay(trace: Path, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["replay", str(trace), str(EXAMPLE), *arguments])


def told(trace: Path, *arguments: str) -> Any:
    done = replay(trace, "--json", *arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def by_name(answer: Any) -> dict[str, dict[str, Any]]:
    return {one["policy"]: one for one in answer["policies"]}


def test_apart_the_prompts_do_not_delay_answers(trace: Path) -> None:
    found = by_name(told(trace, "--chats", "3", "--speed", "2", "--disagg", ",".join(POLICIES)))
    assert list(found) == list(POLICIES)
    assert {one["requests"] for one in found.values()} == {4 * REQUESTS}
    assert found["aggregated"]["separate_ratio"] is None
    assert found["always"]["separate_ratio"] == 1.0
    assert found["always"]["itl_p99_s"] < 0.1 < found["aggregated"]["itl_p99_s"]


def test_only_long_prompts_are_handed_over_on_a_condition(trace: Path) -> None:
    no_limit = ("--set", "disaggregation.max_prefill_queue_size=1000")
    found = by_name(told(trace, "--chats", "3", "--disagg", "conditional", *no_limit))
    one = found["conditional"]
    assert one["decisions"] == {
        "local, short prompt": 3 * REQUESTS,
        "separate, long prompt": REQUESTS,
    }
    assert one["separate_ratio"] == 0.25
    assert 0.9 < one["handed_over_ratio"] < 1.0


def test_a_slow_link_delays_the_first_token(trace: Path) -> None:
    fast = by_name(told(trace, "--disagg", "always"))["always"]
    slow_link = [
        part
        for engine in (0, 1)
        for part in ("--set", f"engines[{engine}].handover_bandwidth_bytes_per_s=1000000000")
    ]
    slow = by_name(told(trace, "--disagg", "always", *slow_link))["always"]
    assert slow["ttft_p50_s"] > fast["ttft_p50_s"] + 0.1
    assert slow["handed_over_ratio"] == fast["handed_over_ratio"]


def test_a_request_that_waits_too_long_for_a_prefill_worker_is_served_without(trace: Path) -> None:
    arguments = (
        *("--set", "engines[1].replicas=1"),
        *("--set", "disaggregation.router.busy.max_active_requests=1"),
        *("--set", "disaggregation.router.busy.max_queue_s=0.2"),
    )
    one = by_name(told(trace, "--disagg", "always", *arguments))["always"]
    assert one["requests"] == REQUESTS
    assert 0 < one["separate_ratio"] < 1
    full = ("--set", "disaggregation.router.busy.max_queued_requests=0")
    fewer = by_name(told(trace, "--disagg", "always", *arguments, *full))["always"]
    assert 0 < fewer["separate_ratio"] <= one["separate_ratio"]


def test_a_queue_of_prompts_is_served_in_the_end(trace: Path) -> None:
    one_at_a_time = (
        *("--set", "engines[1].replicas=1"),
        *("--set", "disaggregation.router.busy.max_active_requests=1"),
        *("--set", "disaggregation.router.busy.max_queue_s=100000"),
    )
    one = by_name(told(trace, "--disagg", "always", *one_at_a_time))["always"]
    assert (one["requests"], one["separate_ratio"]) == (REQUESTS, 1.0)


@frozen(kw_only=True)
class NeedyConfig(DisaggregationConfig):
    limit: int = setting("Must be given.")


def test_a_policy_whose_options_are_required_is_refused() -> None:
    loaded = load_config([EXAMPLE])
    needy = Origin(plugin="needy", distribution="needy")
    loaded.host.disaggs.add(needy, "needy", NeedyConfig, Mock(), "alpha")
    replays = Replays(loaded, "replay.yaml", "trace.jsonl", PlannerTargets(ttft_s=1, itl_s=1))
    with pytest.raises(ConfigError, match=r"needy needs options \(limit\): make it the disagg"):
        replays.disaggregations("always,needy", "--disagg")


def test_rates_and_their_plot(trace: Path, tmp_path: Path) -> None:
    policies = ("--disagg", "aggregated,always", "--chats", "2")
    answer = told(trace, *policies, "--rates", "1,20")
    slow, fast = answer["rates"]
    assert (slow["rate"], fast["rate"]) == (1.0, 20.0)
    for calm, hurried in zip(slow["policies"], fast["policies"], strict=True):
        assert calm["ttft_p99_s"] < hurried["ttft_p99_s"]
        assert calm["good_ratio"] >= hurried["good_ratio"]
    done = replay(trace, *policies, "--rates", "1,20", "--plot", str(tmp_path / "sweep.svg"))
    assert done.exit_code == 0, done.output
    assert "aggregated" in (tmp_path / "sweep.svg").read_text()
    assert "Goodput and p99 ITL" in done.output


def test_equal_seeds_give_equal_sweeps(trace: Path) -> None:
    arguments = ("--disagg", "conditional", "--chats", "2", "--rates", "8", "--seed")
    assert told(trace, *arguments, "4") == told(trace, *arguments, "4")
    assert told(trace, *arguments, "4") != told(trace, *arguments, "5")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--disagg", "sometimes"], 1, 'no disaggregation policy "sometimes"; there are'),
        (["--disagg", "always,sometimes"], 1, "--disagg: 1 problem"),
        (["--disagg", "always", "--policy", "kv"], 2, "give one of"),
        (["--rates", "1", "--speed", "2"], 2, "--rates"),
        (["--rates", "1,none"], 2, "not a valid float"),
        (["--disagg", "always", "--set", "engines[1].role=both"], 1, "`role: prefill`"),
        (["--workers", "3"], 1, "engines[N].replicas"),
    ],
)
def test_what_cannot_be_run_is_said(
    trace: Path, arguments: list[str], code: int, message: str
) -> None:
    done = replay(trace, *arguments)
    assert done.exit_code == code
    assert message in done.output
