"""`python -m bench`: what is not installed leaves out its scenario, and stops nothing else."""

from __future__ import annotations

from pathlib import Path

import bench.__main__ as bench_main
import pytest
from bench import frontdoor, load, result
from bench.needs import NotInstalledError, needs, needs_command
from bench.result import Figure

MISSING = NotInstalledError("`wrk` is missing: install it with `apt-get install wrk`")


def left_out() -> list[Figure]:
    raise MISSING


def measured() -> list[Figure]:
    return [Figure("frontdoor", "time added", 1.0, 2.0, "ms", "direct")]


@pytest.fixture(autouse=True)
def scenarios(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_main, "SCENARIOS", {"load": "chats", "frontdoor": "one request"})
    monkeypatch.setattr(result, "RESULTS", tmp_path)
    monkeypatch.setattr(load, "run", left_out)
    monkeypatch.setattr(frontdoor, "run", measured)


def test_the_others_are_measured_and_what_is_missing_is_named_last(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench_main.main([]) == 0
    out = capsys.readouterr().out
    assert "time added" in out
    assert out.splitlines()[-1] == f"load is left out: {MISSING}"
    assert [path.name for path in tmp_path.iterdir()] == ["frontdoor.json"]


def test_a_named_scenario_that_cannot_run_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench_main.main(["load"]) == 1
    assert "Benchmarks" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert bench_main.main(["frontdoor"]) == 0


def test_an_unknown_scenario_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main.main(["front"]) == 2
    assert "unknown scenario front; there are: load, frontdoor" in capsys.readouterr().out


def test_what_is_needed_is_named_with_its_cure(tmp_path: Path) -> None:
    assert needs(tmp_path, "make peers") == tmp_path
    with pytest.raises(NotInstalledError, match="nothing is missing: install it with `make"):
        needs(tmp_path / "nothing", "make peers")
    with pytest.raises(NotInstalledError, match="`no-such-command` is missing"):
        needs_command("no-such-command", "apt-get install it")
    assert needs_command("sh", "apt-get install dash").endswith("sh")
