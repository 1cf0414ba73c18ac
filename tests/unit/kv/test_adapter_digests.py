"""Adapters are told apart by their content, not by name and path."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from commutator import AdapterIdentity
from commutator_engine_kit.model_identity import AdapterDigests, adapter_digest


def an_adapter(folder: Path, weights: bytes = b"weights", **more: bytes) -> str:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(b"{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    for name, content in more.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return str(folder)


def test_equal_content_is_one_adapter_wherever_it_is(tmp_path: Path) -> None:
    digests = AdapterDigests()
    one = digests.of("sql", an_adapter(tmp_path / "one"))
    assert one == digests.of("other", an_adapter(tmp_path / "two", README_md=b"Read me."))
    assert AdapterIdentity(name="sql", digest=one).digest == one
    for number, folder in enumerate(
        (an_adapter(tmp_path / "three", b"trained"), an_adapter(tmp_path / "four", more_bin=b""))
    ):
        assert digests.of(f"a{number}", folder) != one


def test_a_name_that_is_a_digest_is_taken_at_its_word() -> None:
    digest = "0123456789abcdef" * 4
    assert AdapterDigests().of(digest, "/nowhere") == digest


def test_an_adapter_is_read_once(tmp_path: Path) -> None:
    """What the engine loaded is what was there when it was first used."""
    digests, path = AdapterDigests(), an_adapter(tmp_path / "one")
    first = digests.of("sql", path)
    (tmp_path / "one" / "adapter_model.safetensors").write_bytes(b"of tomorrow")
    assert digests.of("sql", path) == first != adapter_digest(tmp_path / "one")


def test_one_that_cannot_be_read_is_apart_from_all_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    digests = AdapterDigests()
    with caplog.at_level(logging.WARNING):
        found = {digests.of(name, str(tmp_path / "gone")) for name in ("a", "b", "a")}
    assert len(found) == 2
    assert "adapter a: its files cannot be read" in caplog.text
    assert len(caplog.records) == 2, "once for each"
