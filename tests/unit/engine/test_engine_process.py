"""An engine's process that cannot start tells its supervisor why, in words."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from commutator.contract.engine import EngineConfig, LaunchContext, ModelConfig
from commutator.errors import ConfigError, TierError
from commutator.launcher.child import StartFailure, take_start_failure
from commutator_engine_kit.process import EngineStart, engine_command, run_engine_process
from commutator_engine_kit.server import TokenEngine


def run(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run the process of an engine that cannot be built; returns its exit code."""

    def build(config: EngineConfig, start: EngineStart) -> TokenEngine:
        raise error

    context = LaunchContext(
        worker_id="w-0",
        model=ModelConfig(name="m", source="-"),
        host="127.0.0.1",
        port=1,
        state_dir=folder,
    )
    for name, value in engine_command("x", EngineConfig(kind="sim"), context).env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as caught:
        run_engine_process(EngineConfig, build)
    assert isinstance(caught.value.code, int)
    return caught.value.code


def test_what_can_never_start_is_permanent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ConfigError(["device: no GPU; set device: cpu", "dtype: unknown"], "an engine")
    assert run(error, tmp_path, monkeypatch) == os.EX_CONFIG
    told = take_start_failure(tmp_path)
    assert told == StartFailure(
        problems=["device: no GPU; set device: cpu", "dtype: unknown"], is_permanent=True
    )
    assert take_start_failure(tmp_path) is None, "it is told once"


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (TierError("nvme: the disk\nis full"), "nvme: the disk is full"),
        (MemoryError(), None),
        (OSError(12, "Cannot allocate memory"), "OSError: [Errno 12] Cannot allocate memory"),
    ],
)
def test_what_may_pass_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, problem: str | None
) -> None:
    if problem is None:  # an error of the engine's own code keeps its traceback
        with pytest.raises(MemoryError):
            run(error, tmp_path, monkeypatch)
        assert take_start_failure(tmp_path) is None
        return
    assert run(error, tmp_path, monkeypatch) == 1
    assert take_start_failure(tmp_path) == StartFailure(problems=[problem], is_permanent=False)


def test_without_a_common_folder_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    assert run(TierError("nvme: full"), tmp_path / "gone", monkeypatch) == 1
    assert caplog.messages == ["cannot start: nvme: full"]


@pytest.mark.parametrize("text", ["", "{", '{"problems": []}', "[1]"])
def test_what_is_not_written_to_the_end_is_no_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "start-failure.json").write_text(text)
    assert take_start_failure(tmp_path) is None
