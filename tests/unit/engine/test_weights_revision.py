"""Different weights have different revisions."""

from __future__ import annotations

from pathlib import Path

from commutator_engine_kit.model_identity import weights_revision


def model(folder: Path, weights: bytes = b"weights") -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_bytes(weights)
    return folder


def test_equal_files_are_equal_wherever_they_lie(tmp_path: Path) -> None:
    one, two = model(tmp_path / "one"), model(tmp_path / "two")
    assert weights_revision(str(one)) == weights_revision(str(two))


def test_every_byte_and_every_name_counts(tmp_path: Path) -> None:
    plain = model(tmp_path / "plain")
    other = model(tmp_path / "other", b"weightS")
    renamed = model(tmp_path / "renamed")
    (renamed / "config.json").rename(renamed / "config2.json")
    assert len({weights_revision(str(path)) for path in (plain, other, renamed)}) == 3


def test_a_snapshot_is_its_commit(tmp_path: Path) -> None:
    commit = "5f2c1d"
    folder = model(tmp_path / "snapshots" / commit)
    assert weights_revision(str(folder)) == commit
