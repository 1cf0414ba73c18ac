"""``commutator kv bench`` measures real tiers, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commutator.cli import bench_tier
from commutator.cli.bench_tier import Line, _random_memory
from commutator.cli.kv_bench import _show
from commutator.cli.main import main
from commutator.errors import TierError
from commutator.kv.tier_setup import TierSetup

QUICK = ("--total-mib", "1", "--rounds", "1", "--block-kib", "64")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["kv", "bench", *QUICK, *arguments])


def lines(*arguments: str) -> list[dict[str, Any]]:
    done = run("--json", *arguments)
    assert done.exit_code == 0, done.output
    told: list[dict[str, Any]] = json.loads(done.stdout)
    return told


def test_host_memory_and_a_disk(tmp_path: Path) -> None:
    told = lines("--path", str(tmp_path))
    assert {line["tier"] for line in told} == {"dram", "nvme", "nvme-cached"}
    for line in told:
        assert line["block_bytes"] == 65536
        assert line["gb_per_s"] > 0
        assert line["p99_ms"] > 0
        raw, ratio = line["raw_gb_per_s"], line["ratio"]
        file_call = {"store": "pwritev", "load": "preadv"}[line["operation"]]
        assert raw.keys() == {"memcpy" if line["tier"] == "dram" else file_call, "nixl"}
        for way in raw:
            assert ratio[way] == pytest.approx(line["gb_per_s"] / raw[way], rel=0.05, abs=0.002)
    cached = {(line["operation"], line["cache"]) for line in told if line["tier"] == "nvme-cached"}
    assert cached == {("store", "warm"), ("load", "warm"), ("load", "cold")}
    assert list(tmp_path.iterdir()) == []


def test_the_tiers_of_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "{worker}"
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:m}]\n"
        "engines: [{kind: reference}]\n"
        "tiers:\n"
        f"  - {{kind: nvme, path: '{folder}', capacity: 1GB, compression: zstd}}\n"
    )
    told = lines(str(file))
    assert [(line["tier"], line["operation"]) for line in told[:2]] == [
        ("nvme", "store"),
        ("nvme", "load"),
    ]
    assert list(tmp_path.iterdir()) == [file], "the folder was made for this only"


def cluster(folder: Path, tiers: str) -> str:
    file = folder / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:m}]\n"
        "engines: [{kind: reference}]\n"
        f"tiers: [{tiers}]\n"
    )
    return str(file)


def test_tiers_that_are_only_read_from_are_left_out(tmp_path: Path) -> None:
    done = run(cluster(tmp_path, "{kind: dram, capacity: 1MB}, {kind: peer}"))
    assert done.exit_code == 0, done.output
    assert "peer: left out, as nothing can be stored in it" in done.stderr
    assert [row.split()[0] for row in done.stdout.splitlines()[1:]] == ["dram", "dram"]


def test_a_file_of_which_nothing_can_be_measured(tmp_path: Path) -> None:
    done = run(cluster(tmp_path, "{kind: peer}"))
    assert done.exit_code == 1
    assert "there is no tier that blocks can be stored in" in done.stderr


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_a_tier_that_fails_takes_no_results_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]
) -> None:
    def measure(setup: TierSetup, *arguments: Any) -> list[Line]:
        if setup.name == "dram-2":
            raise TierError("dram-2: it broke")
        return measured(setup, *arguments)

    measured = bench_tier.measure
    monkeypatch.setattr(bench_tier, "measure", measure)
    done = run(cluster(tmp_path, ", ".join(["{kind: dram, capacity: 1MB}"] * 3)), *form)
    assert done.exit_code == 1
    assert "  dram-2, 64 KiB: dram-2: it broke" in done.stderr
    if form:
        names = [line["tier"] for line in json.loads(done.stdout)]
    else:
        names = [row.split()[0] for row in done.stdout.splitlines()[1:]]
    assert names == ["dram", "dram", "dram-3", "dram-3"], "also those that come after it"


def test_as_many_bytes_as_there_is_memory_for() -> None:
    size = (256 << 20) + 5
    memory = _random_memory(size)
    assert len(memory) == size
    parts = {memory[start : start + 64] for start in range(0, size, 1 << 20)}
    assert len(parts) == 257, "no two blocks are alike"
    assert any(memory[-5:])
    with pytest.raises(TierError, match="no memory for"):
        _random_memory(1 << 62)


def test_a_table_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = run("--path", str(tmp_path))
    assert done.exit_code == 0, done.output
    heading, *rows = done.stdout.splitlines()
    assert "of NIXL" in heading
    assert [row.split()[:1] for row in rows] == [
        [name] for name in ("dram", "dram", "nvme", "nvme", *["nvme-cached"] * 3)
    ], "one line for each result, at 80 columns"
    assert all("64 KiB" in row for row in rows)
    assert "memcpy" in rows[0]
    assert ["pwritev" in row for row in rows[2:]] == [True, False, True, False, False]
    assert ["preadv" in row for row in rows[2:]] == [False, True, False, True, True]


def test_the_widest_table_fits_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    line = Line(
        tier="nvme-cached",
        block_bytes=256 << 10,
        operation="store",
        cache="warm",
        gb_per_s=12.34,
        p99_ms=1234.5,
        raw_gb_per_s={"pwritev": 12.34, "nixl": 0.123},
    )
    _show([line])
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert "…" not in shown[1]
    assert shown[1].split()[-4:] == ["pwritev", "12.3", "1.00", "100"]


@pytest.mark.parametrize("path", ["/nope", "/proc"])
def test_a_disk_that_cannot_be_measured(path: str) -> None:
    done = run("--path", path)
    assert done.exit_code == 2, done.output
    assert "--path" in done.stderr
    assert path in done.stderr


def test_a_tier_whose_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = tmp_path / "cluster.yaml"
    config.write_text(
        "models: [{name: m, source: package:m}]\n"
        "engines: [{kind: reference}]\n"
        f"tiers: [{{kind: nvme, path: '{tmp_path}/file/kv', capacity: 1GB}}]\n"
    )
    done = run(str(config))
    assert done.exit_code == 1
    assert f"no folder can be made in {tmp_path}/file/kv" in done.stderr


def test_a_file_without_tiers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{name: m, source: package:m}]\nengines: [{kind: reference}]\n")
    done = run(str(file))
    assert done.exit_code == 2
    assert "there are no tiers" in done.stderr
