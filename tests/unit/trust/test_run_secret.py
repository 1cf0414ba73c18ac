"""The secret of a run: its file, what it shows, and who uses it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from commutator.trust.secret import (
    SECRET_FILE,
    RunSecret,
    SecretFileError,
    adopt,
    run_folder,
    secret_of_this_process,
)


def test_a_saved_secret_is_private_and_loads_again(tmp_path: Path) -> None:
    secret, file = RunSecret.new(), tmp_path / "secret"
    secret.save(file)
    assert file.stat().st_mode & 0o777 == 0o600
    assert RunSecret.load(file) == secret != RunSecret.new()


@pytest.mark.security
def test_a_secret_does_not_show_itself(tmp_path: Path) -> None:
    secret, file = RunSecret.new(), tmp_path / "secret"
    secret.save(file)
    assert file.read_text().strip() not in repr(secret) + str(secret)
    assert repr(secret) == repr(RunSecret.new())


@pytest.mark.security
def test_a_secret_is_not_written_over_another_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        RunSecret.new().save(file)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.security
@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "secret"
    RunSecret.new().save(file)
    file.chmod(mode)
    with pytest.raises(SecretFileError, match="0600"):
        RunSecret.load(file)


@pytest.mark.security
def test_links_pipes_and_other_files_are_refused(tmp_path: Path) -> None:
    """A front door names the file to `commutator kv`, and may name any."""
    RunSecret.new().save(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "notes").write_text("my diary")
    (tmp_path / "notes").chmod(0o600)
    for name, problem in {
        "link": "symbolic",
        "pipe": "regular",
        "notes": "32 hex bytes",
        "missing": "No such file",
    }.items():
        with pytest.raises(SecretFileError, match=problem):
            RunSecret.load(tmp_path / name)


def test_hosts_with_one_passphrase_share_a_secret() -> None:
    assert RunSecret.from_text("a") == RunSecret.from_text("a") != RunSecret.from_text("b")


def test_parts_of_a_mac_cannot_be_shifted() -> None:
    secret = RunSecret.from_text("a")
    assert secret.mac("p", b"ab", b"c") != secret.mac("p", b"a", b"bc")
    assert secret.mac("p", b"ab") != secret.mac("pa", b"b")


def test_a_process_has_the_secret_of_its_environment_unless_it_adopts_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_FILE, raising=False)
    assert secret_of_this_process() is None
    assert run_folder() is None
    own, other = RunSecret.new(), RunSecret.new()
    tmp_path.chmod(0o700)
    own.save(tmp_path / "secret")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    assert secret_of_this_process() == own
    assert run_folder() == tmp_path
    with adopt(other):
        assert secret_of_this_process() is other
        assert run_folder() is None
        with adopt(None):
            assert secret_of_this_process() is None
        assert secret_of_this_process() is other
    assert secret_of_this_process() == own


def test_a_folder_that_others_can_enter_is_no_run_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RunSecret.new().save(tmp_path / "secret")
    tmp_path.chmod(0o755)
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    assert run_folder() is None
