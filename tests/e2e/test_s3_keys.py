"""What a tier's keys promise for a bucket of a real S3 server."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from tests.support.at_rest import Prompt, shown
from tests.support.kv_rig import BLOCK_BYTES, KvRig, chain, content, setups
from tests.support.kv_tiers import DRAM
from tests.support.s3_tiers import MakeTier, tier_maker
from tests.support.seaweed import SeaweedServer

from commutator_engine_kit.kv.arena import checksum
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES, AesGcm, Codec, FrameHeader, Gmac
from commutator_engine_kit.kv.tiers.setup import TierSetup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

OLD, NEW = bytes(range(32)), bytes(range(100, 132))
ALICE = Prompt(chain(1, 5), "the salt of Alice", "alices-own-adapter")


@pytest.fixture
def make_tier(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
    return tier_maker(seaweed, seaweed.endpoint, monkeypatch)


def setup_of(make_tier: MakeTier, *codecs: Codec, **options: Any) -> TierSetup:
    return evolve(setups(DRAM)[0], name="s3", tier=make_tier(**options), codecs=codecs)


def bucket_of(make_tier: MakeTier) -> str:
    return str(make_tier().backend_parameters["bucket"])


def objects(seaweed: SeaweedServer, bucket: str) -> dict[str, bytes]:
    listed = seaweed.client.list_objects_v2(Bucket=bucket).get("Contents", [])
    names = [entry["Key"] for entry in listed]
    return {n: seaweed.client.get_object(Bucket=bucket, Key=n)["Body"].read() for n in names}


def count(seaweed: SeaweedServer, bucket: str) -> int:
    return int(seaweed.client.list_objects_v2(Bucket=bucket)["KeyCount"])


def everything(seaweed: SeaweedServer, bucket: str) -> dict[str, bytes]:
    """The bytes of all objects, the whole listing, and all headers of each object."""
    found = objects(seaweed, bucket)
    heads = [seaweed.client.head_object(Bucket=bucket, Key=name) for name in found]
    listing = seaweed.client.list_objects_v2(Bucket=bucket)
    return found | {"listing": repr(listing).encode(), "headers": repr(heads).encode()}


def store(rig: KvRig, prompt: Prompt) -> None:
    rig.offload(prompt.keys, tenant=prompt.salt, adapter=prompt.adapter)
    rig.settle()


@pytest.mark.security
def test_with_an_encryption_key_the_bucket_shows_nothing_of_a_prompt(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    with KvRig([setup_of(make_tier, AesGcm(OLD))]) as rig:
        store(rig, ALICE)
        found = everything(seaweed, bucket_of(make_tier))
        assert len(found) == 5 + 2
        assert shown([ALICE], found) == []
        with KvRig([setup_of(make_tier, AesGcm(OLD), list_limit=0)]) as other:
            assert other.load(ALICE.keys) == 5, "found by asking for their names"
        with KvRig([setup_of(make_tier, AesGcm(OLD))]) as again:
            again.settle()
            assert again.tier("s3").published == 5, "found by listing the bucket"
            assert again.load(ALICE.keys) == 5
        rig.connector.stores.evict()
        rig.wait_for(lambda: count(seaweed, bucket_of(make_tier)) == 0)


def test_the_search_finds_names_and_kv_where_there_is_no_key(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    with KvRig([setup_of(make_tier)]) as rig:
        store(rig, ALICE)
    found = shown([ALICE], everything(seaweed, bucket_of(make_tier)))
    assert "key in listing" in found
    assert any(each.startswith("KV in ") for each in found)


@pytest.mark.parametrize("codec", [AesGcm, Gmac])
def test_keys_are_changed_in_a_running_deployment_without_losing_a_block(
    make_tier: MakeTier, seaweed: SeaweedServer, codec: Any
) -> None:
    """First every worker learns to read the new key, then they begin to write under it."""
    bob, carol = (Prompt(chain(n, 3), f"salt {n}", "adapter") for n in (2, 3))
    with KvRig([setup_of(make_tier, codec(OLD))]) as oldest:
        store(oldest, ALICE)
    late = {"list_limit": 0}
    with (
        KvRig([setup_of(make_tier, codec(OLD, NEW), **late)]) as first,
        KvRig([setup_of(make_tier, codec(NEW, OLD), **late)]) as second,
    ):
        store(first, bob)
        store(second, carol)
        for rig in (first, second):
            for prompt in (ALICE, bob, carol):
                assert rig.load(prompt.keys) == len(prompt.keys)
    with KvRig([setup_of(make_tier, codec(NEW, OLD))]) as listed:
        listed.settle()
        assert listed.tier("s3").published == 5 + 3 + 3
    with KvRig([setup_of(make_tier, codec(NEW))]) as last:
        last.settle()
        assert last.load(carol.keys) == 3
        assert last.load(bob.keys) == 0
    with KvRig([setup_of(make_tier, codec(NEW, OLD))]) as cleaner:
        cleaner.settle()
        cleaner.settle()
        cleaner.connector.stores.evict()
        cleaner.wait_for(lambda: count(seaweed, bucket_of(make_tier)) == 0)


def forge(seaweed: SeaweedServer, bucket: str, tail: bytes) -> None:
    """Replace the end of each object's payload, and mend its checksums, which need no key."""
    for name, data in objects(seaweed, bucket).items():
        header = FrameHeader.parse(memoryview(data), data[16:48])
        payload = data[HEADER_BYTES : -len(tail)] + tail
        forged = evolve(header, checksum=checksum(payload)).pack() + payload
        seaweed.client.put_object(Bucket=bucket, Key=name, Body=forged)


@pytest.mark.security
@pytest.mark.parametrize("codec", [AesGcm(OLD), Gmac(OLD)])
def test_with_a_key_who_can_write_to_the_bucket_cannot_poison_kv(
    make_tier: MakeTier, seaweed: SeaweedServer, codec: Codec
) -> None:
    with KvRig([setup_of(make_tier, codec)]) as rig:
        store(rig, ALICE)
        forge(seaweed, bucket_of(make_tier), content(b"evil", BLOCK_BYTES))
        assert rig.load(ALICE.keys) == 0
        rig.settle()
        assert rig.tier("s3").loads["corrupt"] > 0


@pytest.mark.security
def test_with_a_key_objects_cannot_change_names(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    with KvRig([setup_of(make_tier, Gmac(OLD))]) as rig:
        store(rig, ALICE)
        bucket = bucket_of(make_tier)
        (one, first), (other, second), *_ = objects(seaweed, bucket).items()
        # With the header of the other one, which has no secret in this mode.
        for name, head, body in ((one, first, second), (other, second, first)):
            payload = body[HEADER_BYTES:]
            header = evolve(
                FrameHeader.parse(memoryview(head), head[16:48]), checksum=checksum(payload)
            )
            seaweed.client.put_object(Bucket=bucket, Key=name, Body=header.pack() + payload)
        assert rig.load(ALICE.keys) < 5


def test_without_a_key_who_can_write_to_the_bucket_can_poison_kv(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    """What the documents say; it also shows that the forger above knows the format."""
    rig = KvRig([setup_of(make_tier)])
    store(rig, ALICE)
    forge(seaweed, bucket_of(make_tier), content(b"evil", BLOCK_BYTES))
    with pytest.raises(AssertionError, match="another block"):
        rig.load(ALICE.keys)
    rig.close()


@pytest.mark.security
def test_a_bucket_full_of_foreign_objects_costs_one_bounded_listing(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    with KvRig([setup_of(make_tier, AesGcm(OLD))]) as rig:
        store(rig, ALICE)
    bucket = bucket_of(make_tier)
    folder = next(iter(objects(seaweed, bucket))).rpartition("/")[0].rpartition("/")[0]
    for number in range(30):
        name = f"{folder}/{'0' * 2}/{number:096x}"
        seaweed.client.put_object(Bucket=bucket, Key=name, Body=b"not ours")
    with KvRig([setup_of(make_tier, AesGcm(OLD), list_limit=20)]) as rig:
        rig.settle()
        assert rig.tier("s3").published == 0, "only the first 20 objects were looked at"
        assert rig.load(ALICE.keys) == 5
