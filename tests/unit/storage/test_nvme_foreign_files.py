"""Another user of the machine prepares the disk tier's folder: nothing of it is used or changed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from commutator.contract.tier import SlotGeometry
from commutator.errors import TierError
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier

pytestmark = pytest.mark.security

BLOCK_BYTES = 4096
GEOMETRY = SlotGeometry(
    block_bytes=BLOCK_BYTES, slot_bytes=BLOCK_BYTES, block_tokens=4, identity="a"
)
FILES = ["lock", "index", "owners", "segment-00000"]
STRANGER = 12345


def tier(folder: Path, **options: Any) -> NvmeTier:
    return NvmeTier(NvmeConfig(kind="nvme", path=str(folder), capacity=4 * BLOCK_BYTES, **options))


def refusal(folder: Path) -> str:
    with pytest.raises(TierError) as caught:
        tier(folder, on_mismatch="discard").open(GEOMETRY)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that the tier has used, and left."""
    folder = tmp_path / "blocks"
    used = tier(folder)
    used.open(GEOMETRY)
    used.close()
    return folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symbolic", "hard"])
def test_a_link_to_another_file(
    folder: Path, tmp_path: Path, name: str, link: Callable[[Path, Path], None]
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"a letter\n" * 1000)
    victim.chmod(0o600)
    (folder / name).unlink()
    link(victim, folder / name)
    message = refusal(folder)
    assert "link" in message
    assert "remove" in message
    assert victim.read_bytes() == b"a letter\n" * 1000


@pytest.mark.parametrize("name", ["index.new", "owners.new"])
def test_a_link_in_the_place_of_a_new_file(folder: Path, tmp_path: Path, name: str) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"a letter")
    (folder / name).symlink_to(victim)
    (folder / "index").unlink()
    used = tier(folder)
    used.open(GEOMETRY)
    used.close()
    assert victim.read_bytes() == b"a letter"
    assert not (folder / name).is_symlink()


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_neither_hangs_nor_is_used(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name, 0o600)
    assert "no regular file" in refusal(folder)


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_others_may_write(folder: Path, name: str) -> None:
    (folder / name).chmod(0o620)
    message = refusal(folder)
    assert f"{folder / name} (mode 620)" in message
    assert "chmod 600" in message


def test_a_folder_that_others_may_read(folder: Path) -> None:
    folder.chmod(0o750)
    message = refusal(folder)
    assert f"{folder} (mode 750)" in message
    assert "chmod 700" in message


def test_a_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder)
    assert f"give the path that it points to, {folder}" in refusal(tmp_path / "link")


def test_a_folder_of_another_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert f"{folder} belongs to user {user}" in refusal(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_user(folder: Path, name: str) -> None:
    os.chown(folder / name, STRANGER, STRANGER)
    assert f"{folder / name} belongs to user {STRANGER}" in refusal(folder)


def test_another_users_link_on_the_way_to_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a predictable name in a folder where all may write, such as /tmp."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "predictable").symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        os.lchown(tmp_path / "predictable", STRANGER, STRANGER)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)
    assert "on the way to" in refusal(tmp_path / "predictable" / "worker-0")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_link_of_ones_own_on_the_way_is_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "cache").symlink_to(tmp_path / "disk")
    used = tier(tmp_path / "cache" / "worker-0")
    used.open(GEOMETRY)
    used.close()
    assert (tmp_path / "disk" / "worker-0" / "index").exists()


def test_files_are_opened_so_that_io_waits_for_the_disk(folder: Path) -> None:
    """io_uring answers EAGAIN for a file that was opened with O_NONBLOCK."""
    used = tier(folder)
    used.open(GEOMETRY)
    (region,) = used.regions()
    assert os.get_blocking(region.span.device)
    used.close()
