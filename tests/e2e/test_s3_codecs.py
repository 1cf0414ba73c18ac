"""Workers with other codecs, or another key, on one bucket of a real S3 server."""

from __future__ import annotations

import pytest
from attrs import evolve
from tests.support.kv_rig import KvRig, chain, setups
from tests.support.kv_tiers import DRAM
from tests.support.s3_tiers import MakeTier, tier_maker
from tests.support.seaweed import SeaweedServer

from commutator_engine_kit.kv.tiers import executor
from commutator_engine_kit.kv.tiers.codecs import AesGcm, Codec, Lz4, Zstd
from commutator_engine_kit.kv.tiers.setup import TierSetup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

KEYS = chain(1, 4)


@pytest.fixture
def make_tier(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
    return tier_maker(seaweed, seaweed.endpoint, monkeypatch)


def setup_of(make_tier: MakeTier, *codecs: Codec) -> TierSetup:
    return evolve(setups(DRAM)[0], name="s3", tier=make_tier(), codecs=codecs)


@pytest.mark.parametrize(
    ("mine", "other"),
    [(Zstd(), Lz4()), (AesGcm(bytes(range(32))), AesGcm(bytes(32)))],
    ids=["codec", "key"],
)
def test_neither_sees_or_deletes_what_the_other_stored(
    make_tier: MakeTier, mine: Codec, other: Codec
) -> None:
    with KvRig([setup_of(make_tier, mine)]) as first:
        first.store(KEYS)
        with KvRig([setup_of(make_tier, other)]) as second:
            assert second.load(KEYS) == 0
            second.store(KEYS)
            second.connector.stores.evict()
            second.settle()
        assert first.load(KEYS) == 4
    with KvRig([setup_of(make_tier, mine)]) as again:
        assert again.load(KEYS) == 4


def test_blocks_stored_before_codecs_had_identities_are_not_deleted(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor, "identity_with", lambda codecs, identity: identity)
    with KvRig([setup_of(make_tier, Zstd())]) as first:
        first.store(KEYS)
        with KvRig([setup_of(make_tier)]) as second:
            assert second.load(KEYS) == 0
            second.settle()
            assert second.tier("s3").loads == {"missing": 4}
        assert first.load(KEYS) == 4
