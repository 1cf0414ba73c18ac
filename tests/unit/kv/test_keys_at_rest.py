"""What a tier's keys promise for a folder: nothing to read, nothing to forge, and their change."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.support.at_rest import Prompt, shown, told
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, content, setups

from commutator.contract.tier import TierConfig
from commutator_engine_kit.kv.arena import checksum
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, FrameHeader
from commutator_engine_kit.kv.tiers.setup import TierSetup
from commutator_nvme.index import HEADER_BYTES as INDEX_HEADER_BYTES
from commutator_nvme.index import parse_header

OLD, NEW, OTHER = ("11" * 32, "22" * 32, "33" * 16)
ALICE = Prompt(chain(1, 5), "the salt of Alice, who must not be known", "alices-own-adapter")
BOB = Prompt(chain(2, 4), "bob \u00e9\u00e8 of another company", "bobs-adapter-name")


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OLD", OLD), ("NEW", NEW), ("OTHER", OTHER)):
        monkeypatch.setenv(name, value)


def options(mode: str | None, current: str = "OLD", *read: str) -> dict[str, Any]:
    """`mode` with the key in the variable `current`, and the keys in `read` for reading."""
    if mode is None:
        return {}
    key = {f"{mode}_key": {"env": current}}
    return key | ({"read_keys": [{"env": name} for name in read]} if read else {})


def nvme(folder: Path, keys: Mapping[str, Any], **more: Any) -> TierSetup:
    slot_bytes = 2 * BLOCK_BYTES
    entry = {"kind": "nvme", "path": str(folder), "capacity": 64 * slot_bytes, **keys, **more}
    return setups(entry)[0]


def store(rig: KvRig, *prompts: Prompt) -> None:
    for prompt in prompts:
        rig.offload(prompt.keys, tenant=prompt.salt, adapter=prompt.adapter)
    rig.settle()


def places(folder: Path) -> dict[str, bytes]:
    """The bytes of each file, and the names of all of them."""
    files = {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return files | {"file names": "\n".join(files).encode()}


@pytest.mark.security
@pytest.mark.parametrize("compression", ["none", "zstd"])
def test_with_an_encryption_key_the_folder_shows_nothing_of_a_prompt(
    tmp_path: Path, compression: str
) -> None:
    setup = nvme(tmp_path / "kv", options("encryption"), compression=compression)
    with KvRig([setup]) as rig:
        store(rig, ALICE, BOB)
        assert rig.tier("nvme").published == 9
        assert shown([ALICE, BOB], places(tmp_path / "kv")) == []
    with KvRig([nvme(tmp_path / "kv", options("encryption"), compression=compression)]) as rig:
        rig.settle()
        assert told(rig.events) == {(ALICE.salt, ALICE.adapter): 5, (BOB.salt, BOB.adapter): 4}
        assert rig.load(ALICE.keys) == 5
        assert rig.load(BOB.keys) == 4
        rig.settle()
    assert shown([ALICE, BOB], places(tmp_path / "kv")) == []


def test_the_search_finds_all_of_it_where_there_is_no_key(tmp_path: Path) -> None:
    with KvRig([nvme(tmp_path / "kv", {})]) as rig:
        store(rig, ALICE)
    found = shown([ALICE], places(tmp_path / "kv"))
    for what in ("salt in owners", "adapter in owners", "tokens as <%dI in index", "key in index"):
        assert what in found
    assert "KV in segment-00000" in found


@pytest.mark.security
def test_nothing_of_an_unencrypted_past_is_left_once_a_key_is_set(tmp_path: Path) -> None:
    with KvRig([nvme(tmp_path / "kv", {})]) as rig:
        store(rig, ALICE)
    with KvRig([nvme(tmp_path / "kv", options("encryption"))]) as rig:
        assert not rig.tier("nvme").up, "it is not discarded unless that is asked for"
    encrypted = nvme(tmp_path / "kv", options("encryption"), on_mismatch="discard")
    with KvRig([encrypted]) as rig:
        store(rig, BOB)
        assert rig.load(BOB.keys) == 4
    assert shown([ALICE, BOB], places(tmp_path / "kv")) == []


@pytest.mark.parametrize("mode", ["encryption", "integrity"])
def test_keys_are_changed_without_losing_a_block(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "kv"
    with KvRig([nvme(folder, options(mode, "OLD"))]) as rig:
        store(rig, ALICE)
    with KvRig([nvme(folder, options(mode, "NEW"))]) as rig:
        assert not rig.tier("nvme").up, "a new key alone is refused, not obeyed"
    with KvRig([nvme(folder, options(mode, "NEW", "OLD"))]) as rig:
        assert rig.load(ALICE.keys) == 5
        store(rig, BOB)
    with KvRig([nvme(folder, options(mode, "OLD", "NEW"))]) as rig:
        assert rig.load(ALICE.keys) == 5, "the change can be taken back"
        assert rig.load(BOB.keys) == 4
    with KvRig([nvme(folder, options(mode, "NEW", "OTHER", "OLD"))]) as rig:
        rig.settle()
        whose = told(rig.events)
        assert whose == {(ALICE.salt, ALICE.adapter): 5, (BOB.salt, BOB.adapter): 4}
    with KvRig([nvme(folder, options(mode, "NEW"))]) as rig:
        assert rig.load(BOB.keys) == 4
        assert rig.load(ALICE.keys) == 0, "without the old key its blocks are gone"
        store(rig, ALICE)
        assert rig.load(ALICE.keys) == 5
    if mode == "encryption":
        assert shown([ALICE, BOB], places(folder)) == []


def forge(folder: Path, *, framed: bool) -> None:
    """Give the first block of ``ALICE`` the bytes of another, as who can write there would.

    It knows the formats, and mends every checksum that needs no key.
    """
    index = bytearray((folder / "index").read_bytes())
    header = parse_header(bytes(index))
    assert header is not None
    slots = 64 * 2 * BLOCK_BYTES // header.layout.slot_bytes
    record_bytes = (len(index) - INDEX_HEADER_BYTES) // slots
    segment = bytearray((folder / "segment-00000").read_bytes())
    for slot in range(slots):
        start = INDEX_HEADER_BYTES + slot * record_bytes
        record = bytearray(index[start : start + record_bytes])
        at = slot * header.layout.slot_bytes
        evil = content(b"evil", BLOCK_BYTES)
        if framed:
            sealed = FrameHeader(
                tag=bytes(segment[at + 16 : at + 48]),
                block_bytes=BLOCK_BYTES,
                payload_bytes=np.frombuffer(segment[at + 56 : at + 64], "<u8")[0],
                checksum=0,
                codec=segment[at + 72 : at + 120].rstrip(b"\0").decode("ascii", "replace"),
            )
            payload = bytearray(segment[at + HEADER_BYTES :][: sealed.payload_bytes])
            payload[-BLOCK_BYTES:] = evil[: len(payload)]
            sums = checksum(bytes(payload))
            whole = FrameHeader(
                tag=sealed.tag, block_bytes=BLOCK_BYTES, payload_bytes=len(payload),
                checksum=sums, codec=sealed.codec,
            ).pack() + payload  # fmt: skip
            segment[at : at + len(whole)] = whole
        elif any(record):
            segment[at : at + BLOCK_BYTES] = evil
            record[16:24] = checksum(evil).to_bytes(8, "little")
            seed = (header.nonce + slot) % 2**64
            record[:8] = xxhash.xxh3_64_intdigest(bytes(record[8:]), seed).to_bytes(8, "little")
            index[start : start + record_bytes] = record
    (folder / "index").write_bytes(index)
    (folder / "segment-00000").write_bytes(segment)


@pytest.mark.security
@pytest.mark.parametrize("mode", ["encryption", "integrity"])
def test_with_a_key_who_can_write_to_the_folder_cannot_poison_kv(tmp_path: Path, mode: str) -> None:
    with KvRig([nvme(tmp_path / "kv", options(mode))]) as rig:
        store(rig, ALICE)
    forge(tmp_path / "kv", framed=True)
    with KvRig([nvme(tmp_path / "kv", options(mode))]) as rig:
        assert rig.load(ALICE.keys) == 0
        rig.settle()
        assert rig.tier("nvme").loads["corrupt"] > 0


def test_without_a_key_who_can_write_to_the_folder_can_poison_kv(tmp_path: Path) -> None:
    """What the documents say; it also shows that the forger of the test above knows the format."""
    with KvRig([nvme(tmp_path / "kv", {})]) as rig:
        store(rig, ALICE)
    forge(tmp_path / "kv", framed=False)
    with KvRig([nvme(tmp_path / "kv", {})]) as rig, pytest.raises(AssertionError, match="another"):
        rig.load(ALICE.keys)


@pytest.mark.security
@pytest.mark.parametrize("mode", ["encryption", "integrity"])
def test_blocks_cannot_change_places_in_the_folder(tmp_path: Path, mode: str) -> None:
    """Records and frames that were made with the key, in another slot than theirs."""
    folder = tmp_path / "kv"
    with KvRig([nvme(folder, options(mode))]) as rig:
        store(rig, ALICE)
    index = bytearray((folder / "index").read_bytes())
    header = parse_header(bytes(index))
    assert header is not None
    slots = 64 * 2 * BLOCK_BYTES // header.layout.slot_bytes
    size = (len(index) - INDEX_HEADER_BYTES) // slots
    a, b = INDEX_HEADER_BYTES, INDEX_HEADER_BYTES + size
    index[a : a + size], index[b : b + size] = index[b : b + size], index[a : a + size]
    (folder / "index").write_bytes(index)
    with KvRig([nvme(folder, options(mode))]) as rig:
        assert rig.load(ALICE.keys) == 0
        rig.settle()
        assert rig.tier("nvme").published == 3


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"encryption_key": {"env": "OLD"}, "integrity_key": {"env": "NEW"}}, "integrity_key"),
        ({"read_keys": [{"env": "OLD"}]}, "read_keys"),
    ],
)
def test_keys_without_an_effect_are_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(Exception, match=problem):
        setups({"kind": "dram", "capacity": "1MB", **given})


def test_a_key_is_never_shown() -> None:
    (setup,) = setups({"kind": "dram", "capacity": "1MB", **options("encryption", "OLD", "NEW")})
    assert isinstance(setup.config, TierConfig)
    for secret in (OLD, NEW):
        assert secret not in repr(setup)
        assert str(bytes.fromhex(secret)) not in repr(setup.codecs)
