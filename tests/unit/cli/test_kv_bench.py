"""``commutator kv bench`` measures real tiers, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main

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
    assert {line["tier"] for line in told} == {"dram", "nvme", "nvme-2"}
    for line in told:
        assert line["block_bytes"] == 65536
        assert line["gb_per_s"] > 0
        assert line["p99_ms"] > 0
        raw, ratio = line["raw_gb_per_s"], line["ratio"]
        assert raw.keys() == {"memcpy" if line["tier"] == "dram" else "preadv", "nixl"}
        for way in raw:
            assert ratio[way] == pytest.approx(line["gb_per_s"] / raw[way], rel=0.05, abs=0.002)
    cached = {(line["operation"], line["cache"]) for line in told if line["tier"] == "nvme-2"}
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


def test_a_table_for_people(tmp_path: Path) -> None:
    done = run("--path", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "memcpy" in done.stdout
    assert "64 KiB" in done.stdout


def test_a_file_without_tiers_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("models: [{name: m, source: package:m}]\nengines: [{kind: reference}]\n")
    done = run(str(file))
    assert done.exit_code == 2
    assert "there are no tiers" in done.stderr
