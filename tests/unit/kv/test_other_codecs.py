"""Blocks that went through other codecs, or another key, are neither used nor removed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.kv_rig import IDENTITY, KvRig, chain, folder_setup, setups
from tests.support.kv_tiers import nvme

from commutator_engine_kit.kv.tiers import executor
from commutator_engine_kit.kv.tiers.codecs import AesGcm, Codec, Lz4, Zstd, identity_with
from commutator_engine_kit.kv.tiers.setup import TierSetup

SECRET, OTHER = bytes(range(32)), bytes(32)
KEYS = chain(1, 4)


def shared(folder: Path, *codecs: Codec) -> TierSetup:
    setup = folder_setup(folder, 16, codecs=codecs)
    setup.tier.shared = True
    return setup


def on_nvme(folder: Path, *codecs: Codec, **options: Any) -> TierSetup:
    return evolve(setups(nvme(folder, **options))[0], codecs=codecs)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ((Zstd(),), (Lz4(),)),
        ((Zstd(),), ()),
        ((AesGcm(SECRET),), (AesGcm(OTHER),)),
        ((Zstd(), AesGcm(SECRET)), (AesGcm(SECRET),)),
    ],
)
def test_workers_of_one_bucket_leave_each_others_blocks_alone(
    tmp_path: Path, mine: tuple[Codec, ...], other: tuple[Codec, ...]
) -> None:
    with KvRig([shared(tmp_path, *mine)]) as first:
        first.store(KEYS)
    with KvRig([shared(tmp_path, *other)]) as second:
        assert second.load(KEYS) == 0
        second.store(KEYS)
        assert second.load(KEYS) == 4
    with KvRig([shared(tmp_path, *mine)]) as first:
        assert first.load(KEYS) == 4
    with KvRig([shared(tmp_path, *other)]) as second:
        assert second.load(KEYS) == 4


@pytest.mark.parametrize(
    ("mine", "other"), [(Zstd(), Lz4()), (AesGcm(SECRET), AesGcm(OTHER))], ids=["codec", "key"]
)
def test_a_disk_with_blocks_of_other_codecs_is_refused_and_stays(
    tmp_path: Path, mine: Codec, other: Codec
) -> None:
    with KvRig([on_nvme(tmp_path, mine)]) as rig:
        rig.store(KEYS)
    with KvRig([on_nvme(tmp_path, other)]) as rig:
        assert not rig.tier("nvme").up
        assert rig.load(KEYS) == 0
    with KvRig([on_nvme(tmp_path, mine)]) as rig:
        assert rig.load(KEYS) == 4
    with KvRig([on_nvme(tmp_path, other, on_mismatch="discard")]) as rig:
        rig.store(KEYS)
        assert rig.load(KEYS) == 4


def test_an_intact_block_of_another_codec_is_missing_and_only_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As before codecs were part of the identity.
    monkeypatch.setattr(executor, "identity_with", lambda codecs, identity: identity)
    with KvRig([shared(tmp_path, Zstd())]) as first:
        first.store(KEYS)
    setup = shared(tmp_path)
    freed: dict[str, list[bytes]] = {"room": [], "evicted": []}
    monkeypatch.setattr(setup.tier, "make_room", freed["room"].extend)
    monkeypatch.setattr(setup.tier, "evict", freed["evicted"].extend)
    with KvRig([setup]) as second:
        assert second.load(KEYS) == 0
        second.wait_for(lambda: set(freed["room"]) == set(KEYS))
        assert freed["evicted"] == []
        assert second.tier("folder").loads == {"missing": 4}


def test_the_identity_tells_codecs_and_keys_apart_but_no_key() -> None:
    plain = IDENTITY.digest.hex()
    assert identity_with((), plain) == plain
    chains = [(Zstd(),), (Lz4(),), (AesGcm(SECRET),), (AesGcm(OTHER),), (Zstd(), AesGcm(SECRET))]
    assert len({identity_with(codecs, plain) for codecs in chains} | {plain}) == 6
    assert identity_with((Zstd(3),), plain) == identity_with((Zstd(),), plain)
    assert SECRET.hex() not in AesGcm(SECRET).fingerprint
