"""From the configuration's `tiers` to what the KV service is given."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.kv_rig import setups

from commutator.contract.tier import AdmissionConfig
from commutator.errors import ConfigError, TierError
from commutator.schema import StructureError
from commutator_dram.tier import DramTier
from commutator_engine_kit.kv.tiers.codecs import chain_name
from commutator_engine_kit.kv.tiers.setup import read_tiers
from commutator_nvme.tier import NvmeTier

DRAM = {"kind": "dram", "capacity": "1MB"}
ENCRYPTED = {"encryption_key": {"env": "BLOCK_KEY"}}


def test_defaults() -> None:
    (setup,) = setups(DRAM)
    assert (setup.name, setup.codecs, setup.spec().admission) == ("dram", (), AdmissionConfig())
    assert isinstance(setup.tier, DramTier)
    assert setup.write == "through"
    assert setup.config.max_bytes_per_s is None
    assert not setup.framed


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCK_KEY", "00" * 32)
    (setup,) = setups(
        {
            **DRAM,
            "write": "on_evict",
            "eviction": {"kind": "s3fifo"},
            "admission": {"prompt_only": True, "max_blocks": 7, "min_hits": 3},
            "compression": "zstd",
            **ENCRYPTED,
            "load_timeout_s": 1.5,
            "store_timeout_s": 2.5,
            "max_attempts": 4,
            "max_bytes_per_s": "10MB",
            "max_failures": 9,
        }
    )
    assert setup.write == "on_evict"
    assert setup.spec().admission == AdmissionConfig(prompt_only=True, max_blocks=7, min_hits=3)
    assert chain_name(setup.codecs) == "zstd+aes-gcm"
    assert setup.framed
    config = setup.config
    assert (config.load_timeout_s, config.store_timeout_s, config.max_attempts) == (1.5, 2.5, 4)
    assert setup.config.max_bytes_per_s == 10_000_000
    assert setup.breaker.max_failures == 9
    assert type(setup.eviction(10)).__name__ == "S3Fifo"


def test_tiers_of_one_kind_have_numbers_and_their_own_breakers() -> None:
    made = setups(DRAM, {"kind": "nvme", "path": "a", "capacity": "1MB"}, DRAM)
    assert [setup.name for setup in made] == ["dram", "nvme", "dram-2"]
    assert made[0].breaker is not made[2].breaker
    assert made[0].tier is not made[2].tier


def test_each_worker_has_its_own_folder(tmp_path: Path) -> None:
    entry = {"kind": "nvme", "path": f"{tmp_path}/{{worker}}/kv", "capacity": "1MB"}
    (setup,) = setups(entry, worker="engine-7")
    assert isinstance(setup.tier, NvmeTier)
    assert setup.tier.folder == tmp_path / "engine-7" / "kv"
    assert setup.tier.folder.is_dir()


@pytest.mark.parametrize("key", ["00" * 17, "secret"])
def test_a_key_that_is_none_is_refused_without_being_shown(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCK_KEY", key)
    with pytest.raises(TierError, match="encryption") as refused:
        setups({**DRAM, **ENCRYPTED})
    assert key not in str(refused.value)


@pytest.mark.parametrize("option", [{"compression": "gzip"}, {"max_attempts": 0}, {"wrote": 1}])
def test_what_is_no_option_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(StructureError):
        setups({**DRAM, **option})


@pytest.mark.parametrize(
    ("module", "option", "package"),
    [
        ("zstandard", {"compression": "zstd"}, "zstandard"),
        ("lz4.frame", {"compression": "lz4"}, "lz4"),
        ("cryptography.exceptions", ENCRYPTED, "cryptography"),
    ],
)
def test_a_codecs_package_that_is_missing_is_named(
    module: str, option: dict[str, Any], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLOCK_KEY", "00" * 32)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(TierError, match=f"pip install {package}"):
        setups({**DRAM, **option})


def test_plugins_that_a_file_with_tiers_blocks_are_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text("tiers: [{kind: dram, capacity: 1MB}]\nplugins: {block: [nvme]}\n")
    (setup,) = read_tiers(file, "w-0")
    assert setup.name == "dram"
    file.write_text("tiers: [{kind: dram, capacity: 1MB}]\nplugins: {block: [dram]}\n")
    with pytest.raises(ConfigError, match=r'offers the tier "dram".*not loaded: .*dram.*: blocked'):
        read_tiers(file, "w-0")
    file.write_text("tiers: [{kind: dram, capacity: 1MB}]\nplugins: {block: dram}\n")
    with pytest.raises(ConfigError, match=r"plugins\.block: expected a list"):
        read_tiers(file, "w-0")
