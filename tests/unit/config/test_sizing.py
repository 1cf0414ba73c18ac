"""A tier with less room than what lies above it is warned of, with the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.config.checks import tier_warnings
from commutator.config.load import load_config
from commutator.errors import ConfigError

ARENA = "engines: [{kind: reference, kv_cache_bytes: 1000000}]\n"


def written(folder: Path, tiers: str, engines: str = ARENA) -> Path:
    file = folder / "cluster.yaml"
    file.write_text(f"models: [{{name: m, source: package:m}}]\n{engines}tiers: [{tiers}]\n")
    return file


def warnings(file: Path) -> list[str]:
    loaded = load_config([file])
    return list(tier_warnings(loaded.config, loaded.host))


def dram(size: int) -> str:
    return f"{{kind: dram, capacity: {size}}}"


def test_growing_tiers_are_as_they_should_be(tmp_path: Path) -> None:
    assert warnings(written(tmp_path, f"{dram(1_000_000)}, {dram(1_000_000)}, {dram(2**40)}")) == []


def test_a_tier_below_the_size_of_the_arena(tmp_path: Path) -> None:
    (told,) = warnings(written(tmp_path, dram(400_000)))
    assert told == (
        "tiers[0] (dram): 400kB is less than the 1MB of engine reference's KV memory, so it will "
        "rarely help; set capacity above 1MB"
    )


def test_a_tier_below_a_larger_one(tmp_path: Path) -> None:
    (told,) = warnings(written(tmp_path, f"{dram(5_000_000)}, {dram(2_000_000)}"))
    assert told.startswith("tiers[1] (dram): 2MB is less than the 5MB of tiers[0] (dram), so")


def test_tiers_without_a_size_are_passed_over(tmp_path: Path) -> None:
    s3 = "{kind: s3, bucket: b}"
    assert warnings(written(tmp_path, f"{dram(5_000_000)}, {s3}")) == []
    told = warnings(written(tmp_path, f"{dram(5_000_000)}, {s3}, {dram(2_000_000)}"))
    assert [line for line in told if "(dram)" in line and "2MB is less" in line] == told[1:]


@pytest.mark.parametrize("size", [400_000, 1_000_000])
def test_config_check_tells_and_succeeds(tmp_path: Path, size: int) -> None:
    file = str(written(tmp_path, dram(size)))
    done = CliRunner().invoke(main, ["config", "check", "--elsewhere", file])
    assert done.exit_code == 0
    assert done.stderr.startswith("warning: tiers[0]") == (size == 400_000)
    assert done.stdout.endswith(": ok\n")


def test_what_workers_exchange_has_one_encoding(tmp_path: Path) -> None:
    packed = "{kind: dram, capacity: 2000000, compression: zstd}"
    load_config([written(tmp_path, f"{packed}, {{kind: peer, compression: zstd}}")])
    load_config([written(tmp_path, "{kind: peer, compression: zstd}")])  # nothing is lent
    with pytest.raises(ConfigError) as caught:
        load_config([written(tmp_path, f"{packed}, {{kind: peer}}")])
    (problem,) = caught.value.problems
    assert ":3: tiers[1].compression: must be the same as in the tier dram" in problem
