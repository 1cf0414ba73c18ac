"""`python -m bench.tier_speed` measures real tiers, and leaves no block behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench import tier_speed
from bench.tier_speed import Line, _random_memory, main, measure_file
from click.testing import CliRunner

from commutator.errors import TierError
from commutator_engine_kit.kv.tiers.setup import TierSetup

SIZES = (64 << 10, 1 << 20, 1)
"""Of a block, of all blocks, and rounds."""


def cluster(folder: Path, tiers: str) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:m}]\n"
        "engines: [{kind: reference}]\n"
        f"tiers: [{tiers}]\n"
    )
    return file


def test_host_memory_and_a_disk(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    cached = f"{{kind: nvme, path: '{folder}/1/{{worker}}', capacity: 1GB, direct: 'off'}}"
    direct = f"{{kind: nvme, path: '{folder}/2', capacity: 1GB}}"
    file = cluster(tmp_path, f"{{kind: dram, capacity: 1MB}}, {cached}, {direct}")
    lines = []
    for line in measure_file(file, *SIZES):
        assert isinstance(line, Line), line
        lines.append(line)
    assert {line.tier for line in lines} == {"dram", "nvme", "nvme-2"}
    for line in lines:
        assert line.block_bytes == 65536
        assert line.gb_per_s > 0
        assert line.p99_ms > 0
        file_call = {"store": "pwritev", "load": "preadv"}[line.operation]
        assert line.raw_gb_per_s.keys() == {"memcpy" if line.tier == "dram" else file_call, "nixl"}
        told = line.as_json()
        for way, raw in told["raw_gb_per_s"].items():
            assert told["ratio"][way] == pytest.approx(told["gb_per_s"] / raw, rel=0.05, abs=0.002)
    found = {(line.operation, line.cache) for line in lines if line.tier == "nvme"}
    assert found == {("store", "warm"), ("load", "warm"), ("load", "cold")}
    assert [path for path in folder.rglob("*") if path.is_file()] == []


def test_tiers_that_are_only_read_from_are_left_out(tmp_path: Path) -> None:
    file = cluster(tmp_path, "{kind: dram, capacity: 1MB}, {kind: peer}")
    assert [line.tier for line in measure_file(file, *SIZES) if isinstance(line, Line)] == [
        "dram"
    ] * 2


def test_a_tier_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(setup: TierSetup, block: int, total: int, rounds: int) -> list[Line]:
        if setup.name == "dram-2":
            raise TierError("dram-2: it broke")
        return measured(setup, block, total, rounds)

    measured = tier_speed.measure
    monkeypatch.setattr(tier_speed, "measure", measure)
    file = cluster(tmp_path, ", ".join(["{kind: dram, capacity: 1MB}"] * 3))
    size = ["--total-mib", "1", "--rounds", "1", "--block-kib", "64"]
    done = CliRunner().invoke(main, [str(file), *size])
    assert done.exit_code == 1
    assert "error: dram-2: it broke" in done.stderr
    names = [json.loads(line)["tier"] for line in done.stdout.splitlines()]
    assert names == ["dram", "dram", "dram-3", "dram-3"]


def test_as_many_bytes_as_there_is_memory_for() -> None:
    size = (256 << 20) + 5
    memory = _random_memory(size)
    assert len(memory) == size
    parts = {memory[start : start + 64] for start in range(0, size, 1 << 20)}
    assert len(parts) == 257, "no two blocks are alike"
    assert any(memory[-5:])
    with pytest.raises(TierError, match="no memory for"):
        _random_memory(1 << 62)


def test_a_file_with_mistakes_is_an_error_that_lists_them(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, [str(cluster(tmp_path, "{kind: dram}"))])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "tiers[0].capacity: required, but missing" in done.stderr
