"""The disk tier's own promises: what a folder survives, and what it says when it cannot go on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from attrs import evolve
from tests.support.small_disk import run_on_small_disk

import commutator_nvme.index
from commutator.contract.tier import SlotGeometry
from commutator.errors import TierError
from commutator_nvme.config import NvmeConfig
from commutator_nvme.files import write_at
from commutator_nvme.tier import NvmeTier
from commutator_testing.tier_user import TierUser

BLOCK_BYTES = 4096
GEOMETRY = SlotGeometry(
    block_bytes=BLOCK_BYTES, slot_bytes=BLOCK_BYTES, block_tokens=4, identity="a"
)
KEYS = [bytes([number]) * 32 for number in range(1, 9)]


def config(folder: Path, **options: Any) -> NvmeConfig:
    options = {"capacity": 6 * BLOCK_BYTES, **options}
    return NvmeConfig(kind="nvme", path=str(folder), **options)


def use(folder: Path, geometry: SlotGeometry = GEOMETRY, **options: Any) -> TierUser:
    return TierUser(NvmeTier(config(folder, **options)), geometry)


def block(number: int) -> bytes:
    return bytes([number + 100]) * BLOCK_BYTES


def fill(user: TierUser, count: int = 6) -> None:
    for number in range(count):
        assert user.put(KEYS[number], block(number))


def refusal(folder: Path, geometry: SlotGeometry = GEOMETRY, **options: Any) -> str:
    with pytest.raises(TierError) as caught:
        NvmeTier(config(folder, **options)).open(geometry)
    return str(caught.value)


def test_a_missing_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with use(folder) as user:
        fill(user)
    assert folder.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
    assert {file.name for file in folder.iterdir()} == {
        "index",
        "lock",
        "owners",
        "segment-00000",
    }


def test_room_is_taken_at_once(tmp_path: Path) -> None:
    with use(tmp_path, capacity=3 << 20, segment_size=1 << 20):
        sizes = [file.stat().st_size for file in sorted(tmp_path.glob("segment-*"))]
        assert sizes == [1 << 20] * 3
        taken = [file.stat().st_blocks * 512 for file in tmp_path.glob("segment-*")]
        assert min(taken) >= 1 << 20


def test_two_may_not_share_a_folder(tmp_path: Path) -> None:
    with use(tmp_path):
        assert f"in use by process {os.getpid()}" in refusal(tmp_path)
    use(tmp_path).close()


def test_a_worker_id_must_have_been_put_in(tmp_path: Path) -> None:
    assert "{worker}" in refusal(tmp_path / "{worker}")
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_below_one_block(tmp_path: Path) -> None:
    assert "at least 4096" in refusal(tmp_path, capacity=4095)


def test_a_capacity_beyond_the_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    assert "free some room, or lower capacity" in refusal(tmp_path, capacity=1 << 50)
    assert not list(tmp_path.glob("segment-*"))
    use(tmp_path).close()


def test_a_capacity_far_beyond_the_disk_is_refused_at_once(tmp_path: Path) -> None:
    """It would have a million million segments: even a list of their names is too large."""
    message = refusal(tmp_path, capacity=1 << 60, segment_size=1 << 20)
    assert f"needs {1 << 60} bytes more and has " in message
    assert "lower capacity" in message


def test_room_that_is_taken_already_is_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with use(tmp_path, capacity=5 << 19, segment_size=1 << 20):
        pass
    (tmp_path / "segment-00007").write_bytes(b"not needed")
    (tmp_path / "segment-x").write_bytes(b"no segment")
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=0, f_frsize=4096))
    with use(tmp_path, capacity=5 << 19, segment_size=1 << 20):
        assert not (tmp_path / "segment-00007").exists()
    assert f"needs {1 << 19} bytes more and has 0" in refusal(
        tmp_path, capacity=3 << 20, segment_size=1 << 20
    )


@pytest.mark.parametrize("path", ["", " ", "a\0b"])
def test_a_path_that_names_no_folder(path: str) -> None:
    with pytest.raises(ValueError, match="path: expected the path of a folder"):
        NvmeConfig(kind="nvme", path=path, capacity=BLOCK_BYTES)


@pytest.mark.parametrize("in_the_way", [".", "index", "segment-00000", "lock"])
def test_something_else_is_in_the_way(tmp_path: Path, in_the_way: str) -> None:
    folder = tmp_path / "blocks"
    if in_the_way == ".":
        folder.write_text("a file")
    else:
        (folder / in_the_way).mkdir(parents=True)
    assert "another path" in refusal(folder)


@pytest.mark.parametrize(
    ("geometry", "problem"),
    [
        (evolve(GEOMETRY, identity="b"), "another model"),
        (evolve(GEOMETRY, block_bytes=4000), "have 4096 bytes"),
        (evolve(GEOMETRY, slot_bytes=8192), "in slots of 4096 bytes"),
        (evolve(GEOMETRY, block_tokens=5), "and 4 tokens"),
    ],
)
def test_blocks_of_another_deployment(tmp_path: Path, geometry: SlotGeometry, problem: str) -> None:
    with use(tmp_path) as user:
        fill(user)
    message = refusal(tmp_path, geometry)
    assert problem in message
    assert "on_mismatch: discard" in message
    with use(tmp_path) as user:
        assert len(user.recovered) == 6, "a refusal changes nothing"
    with use(tmp_path, geometry, on_mismatch="discard", capacity=80_000) as user:
        assert user.recovered == []
        fill(user, 1)
    with use(tmp_path, geometry, capacity=80_000) as user:
        assert user.get(KEYS[0]) == block(0)


def test_a_larger_and_a_smaller_capacity(tmp_path: Path) -> None:
    with use(tmp_path, capacity=300 * BLOCK_BYTES, segment_size=1 << 20) as user:
        fill(user)
    with use(tmp_path, capacity=600 * BLOCK_BYTES, segment_size=1 << 20) as user:
        assert [user.get(key) for key in KEYS[:6]] == [block(n) for n in range(6)]
        assert user.tier.statistics().capacity == 600
    with use(tmp_path, capacity=4 * BLOCK_BYTES, segment_size=1 << 20) as user:
        assert [user.get(key) for key in KEYS[:4]] == [block(n) for n in range(4)]
        assert user.tier.statistics().committed == user.tier.statistics().capacity == 4
    assert len(list(tmp_path.glob("segment-*"))) == 1
    with use(tmp_path, capacity=300 * BLOCK_BYTES, segment_size=1 << 20) as user:
        assert len(user.recovered) == 4, "what was cut off does not come back"


@pytest.mark.parametrize("name", ["index", "segment-00000"])
def test_a_file_removed_while_running(tmp_path: Path, name: str) -> None:
    user = use(tmp_path)
    fill(user, 2)
    (tmp_path / name).unlink()
    assert user.get(KEYS[0]) == block(0), "what is open can still be read"
    (slot,) = user.tier.reserve([KEYS[4]])
    assert slot is not None
    with pytest.raises(TierError, match="was removed; close and open"):
        user.tier.commit([user.write(slot, KEYS[4], block(4))])
    assert user.tier.statistics().reserved == 1
    assert user.find(KEYS[4]) == [None]
    user.close()
    with use(tmp_path) as again:
        assert again.recovered == []
        fill(again)


def test_a_segment_removed_or_cut_between_lives(tmp_path: Path) -> None:
    options: dict[str, Any] = {"capacity": 3 << 20, "segment_size": 1 << 20}
    with use(tmp_path, **options) as user:
        keys = [number.to_bytes(32, "big") for number in range(768)]
        assert all(user.put(key, b"x") for key in keys)
    (tmp_path / "segment-00001").unlink()
    os.truncate(tmp_path / "segment-00002", 10 * BLOCK_BYTES + 1)
    with use(tmp_path, **options) as user:
        assert {stored.slot for stored in user.recovered} == {*range(256), *range(512, 522)}
        assert user.tier.statistics().damaged == 768 - 266
        assert user.put(KEYS[1], block(1))
    with use(tmp_path, **options) as user:
        assert user.tier.statistics().damaged == 0, "counted once"
        assert user.get(KEYS[1]) == block(1)


def test_a_damaged_copy_of_the_header_is_repaired(tmp_path: Path) -> None:
    with use(tmp_path) as user:
        fill(user)
    whole = (tmp_path / "index").read_bytes()
    for position in (0, 9, 40, 4096, 4100):
        (tmp_path / "index").write_bytes(flipped(whole, position))
        with use(tmp_path) as user:
            assert len(user.recovered) == 6
        assert (tmp_path / "index").read_bytes() == whole


def test_both_copies_damaged(tmp_path: Path) -> None:
    with use(tmp_path) as user:
        fill(user)
    data = (tmp_path / "index").read_bytes()
    (tmp_path / "index").write_bytes(flipped(flipped(data, 20), 4096 + 30))
    assert "both copies" in refusal(tmp_path)
    with use(tmp_path, on_mismatch="discard") as user:
        assert user.recovered == []
        fill(user)


def test_a_damaged_record_costs_its_block(tmp_path: Path) -> None:
    with use(tmp_path) as user:
        fill(user)
    data = (tmp_path / "index").read_bytes()
    record_bytes = (len(data) - 8192) // 6
    (tmp_path / "index").write_bytes(flipped(data, 8192 + 2 * record_bytes + 50))
    with use(tmp_path) as user:
        assert user.tier.statistics().damaged == 1
        assert {stored.key for stored in user.recovered} == {*KEYS[:2], *KEYS[3:6]}
        assert user.put(KEYS[2], block(2))


def test_a_record_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails at the second of two records: neither block is committed, now or later."""
    user = use(tmp_path)
    fill(user, 1)
    slots = user.tier.reserve(KEYS[3:5])
    blocks = [
        user.write(slot, key, b"x") for slot, key in zip(slots, KEYS[3:5], strict=True) if slot
    ]
    real, calls = write_at, list[int]()

    def failing(descriptor: int, data: bytes, offset: int) -> None:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        real(descriptor, data, offset)

    monkeypatch.setattr(commutator_nvme.index, "write_at", failing)
    with pytest.raises(TierError, match="Input/output error"):
        user.tier.commit(blocks)
    assert user.tier.statistics().reserved == 2
    user.crash()
    with use(tmp_path) as again:
        assert [stored.key for stored in again.recovered] == KEYS[:1]


def test_a_record_that_cannot_be_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with use(tmp_path) as user:
        fill(user, 1)
        with monkeypatch.context() as patched:
            patched.setattr(commutator_nvme.index, "write_at", _full)
            with pytest.raises(TierError, match="free some room"):
                user.tier.evict(KEYS[:1])
        assert user.get(KEYS[0]) == block(0)
        user.tier.evict(KEYS[:1])
        assert user.get(KEYS[0]) is None


def _full(descriptor: int, data: bytes, offset: int) -> None:
    raise OSError(28, "No space left on device")


def test_against_power_cuts_the_order_is_data_record_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    names: dict[int, str] = {}

    def name(descriptor: int) -> str:
        return names.setdefault(descriptor, Path(f"/proc/self/fd/{descriptor}").readlink().name)

    real_flush, real_write = os.fdatasync, os.pwrite

    def flush(descriptor: int) -> None:
        steps.append(f"flush {name(descriptor)}")
        real_flush(descriptor)

    def write(descriptor: int, data: Any, offset: int) -> int:
        steps.append(f"write {name(descriptor)}")
        return real_write(descriptor, data, offset)

    with use(tmp_path, durable="power") as user:
        monkeypatch.setattr(os, "fdatasync", flush)
        monkeypatch.setattr(os, "pwrite", write)
        fill(user, 1)
        assert steps == ["flush segment-00000", "write index", "flush index"]
        steps.clear()
        user.tier.evict(KEYS[:1])
        assert steps == ["write index", "flush index"]


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    with use(tmp_path) as user:
        (slot,) = user.tier.reserve([KEYS[0]])
        assert slot is not None
        stored = evolve(user.write(slot, KEYS[0], block(0)), token_ids=(1, 2, 3, 4, 5))
        with pytest.raises(ValueError, match="at most 4"):
            user.tier.commit([stored])


def test_direct_io_only_for_whole_pages_unless_asked_for(tmp_path: Path) -> None:
    odd = evolve(GEOMETRY, block_bytes=5000, slot_bytes=5000)
    expected = {("auto", 4096): 4096, ("off", 4096): 1, ("auto", 5000): 1, ("on", 5000): 4096}
    for number, ((direct, size), alignment) in enumerate(expected.items()):
        folder = tmp_path / str(number)
        with use(folder, GEOMETRY if size == 4096 else odd, direct=direct) as user:
            assert user.tier.alignment_bytes == alignment


def test_gds_without_a_gpu(tmp_path: Path) -> None:
    assert "set backend: POSIX" in refusal(tmp_path, backend="GDS")
    with pytest.raises(ValueError, match="no effect with backend GDS"):
        config(tmp_path, backend="GDS", io="uring")


@pytest.mark.slow
def test_a_full_disk(tmp_path: Path) -> None:
    """Not only too small from the beginning: filled by others between the look and the taking."""
    code = _program(
        tmp_path / "disk",
        """
for capacity in (64 << 20, 2 << 20):
    if capacity == 2 << 20:
        os.statvfs = lambda path: types.SimpleNamespace(f_bavail=1 << 40, f_frsize=1)
        open(folder + "/other", "wb").write(bytes(3 << 20))
    print(refusal(capacity))
os.unlink(folder + "/other")
print(os.path.exists(folder + "/segment-00000"), len(opened(2 << 20)))
""",
    )
    first, second, last = run_on_small_disk(tmp_path / "disk", code).splitlines()
    assert "needs 67108864 bytes more" in first
    assert "No space left on device; free some room, or lower capacity" in second
    assert last == "False 0"


@pytest.mark.slow
def test_a_read_only_disk(tmp_path: Path) -> None:
    code = _program(tmp_path / "disk", "print(refusal(1 << 20))")
    answer = run_on_small_disk(tmp_path / "disk", code, "size=4m,ro")
    assert "make the file system writable, or choose another path" in answer


def _program(folder: Path, body: str) -> str:
    return f"""
import os, types
from commutator.errors import TierError
from commutator import SlotGeometry
from commutator_nvme.config import NvmeConfig
from commutator_nvme.tier import NvmeTier
from commutator_nvme.files import write_at
folder = {str(folder)!r}
geometry = SlotGeometry(block_bytes=4096, slot_bytes=4096, identity="a")
def opened(capacity):
    return NvmeTier(NvmeConfig(kind="nvme", path=folder, capacity=capacity)).open(geometry)
def refusal(capacity):
    try:
        opened(capacity)
    except TierError as error:
        return error
{body}
"""


def flipped(data: bytes, position: int) -> bytes:
    changed = bytearray(data)
    changed[position] ^= 0x10
    return bytes(changed)
