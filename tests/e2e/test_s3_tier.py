"""The s3 tier over NIXL, against a real S3 server."""

from __future__ import annotations

import pytest
from tests.support.s3_tiers import MakeTier, tier_maker
from tests.support.seaweed import SeaweedServer
from tests.support.tier_mover import TierMover, block_of, geometry_of, random_keys

from commutator.contract.settings import Secret
from commutator.contract.tier import UNBOUNDED, Direction
from commutator_engine_kit.kv.tiers.codecs import HEADER_BYTES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCK_BYTES = 1000
FRAME_BYTES = HEADER_BYTES + BLOCK_BYTES


@pytest.fixture
def make_tier(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> MakeTier:
    """Tiers over a fresh bucket, or with any other option."""
    return tier_maker(seaweed, seaweed.endpoint, monkeypatch)


def test_blocks_come_back_and_outlive_the_worker(make_tier: MakeTier) -> None:
    keys = random_keys(10)
    expected = [block_of(key, BLOCK_BYTES) for key in keys]
    with TierMover(make_tier()) as mover:
        assert mover.store(keys) == [None] * 10
        assert mover.load(keys) == expected
        assert mover.tier.statistics().committed == 10
        assert mover.tier.statistics().capacity == UNBOUNDED
    with TierMover(make_tier()) as mover:
        assert {stored.key for stored in mover.tier.committed()} == set(keys)
        assert mover.load(keys) == expected


def test_workers_find_what_others_stored(make_tier: MakeTier) -> None:
    keys, strangers = random_keys(9), random_keys(3, seed=1)
    with TierMover(make_tier()) as first, TierMover(make_tier(list_limit=0)) as second:
        first.store(keys)
        assert second.tier.lookup(keys) == [None] * 9
        found = second.tier.probe(keys + strangers)
        assert [block is not None for block in found] == [True] * 9 + [False] * 3
        assert {block.size_bytes for block in found if block is not None} == {FRAME_BYTES}
        assert second.tier.lookup(keys + strangers) == found, "found blocks stay known"
        assert second.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]


def test_a_chain_is_asked_for_up_to_its_first_missing_block(make_tier: MakeTier) -> None:
    keys = random_keys(12)
    with TierMover(make_tier()) as first, TierMover(make_tier(list_limit=0)) as second:
        first.store(keys[:5] + keys[6:])
        found = second.tier.probe(keys)
        assert [block is not None for block in found] == [True] * 5 + [False] * 7


def test_another_identity_is_never_seen(make_tier: MakeTier) -> None:
    keys = random_keys(4)
    with TierMover(make_tier()) as mover:
        mover.store(keys)
    other = make_tier()
    assert list(other.open(geometry_of(BLOCK_BYTES, identity="cd" * 32))) == []
    assert other.probe(keys) == [None] * 4
    other.close()


def test_evicted_objects_are_deleted_for_all_workers(
    make_tier: MakeTier, seaweed: SeaweedServer
) -> None:
    keys = random_keys(6)
    tier = make_tier()
    with TierMover(tier) as first, TierMover(make_tier()) as second:
        first.store(keys)
        second.tier.probe(keys)
        first.tier.evict([*keys[:4], *random_keys(1, seed=9)])
        assert [block is not None for block in first.tier.probe(keys[4:])] == [True, True]
        assert first.tier.probe(keys[:1]) == [None]
        assert second.load(keys)[:4] == ["failed"] * 4, "known there, but gone"
        second.tier.evict(keys[:4])
        listed = seaweed.client.list_objects_v2(Bucket=tier.backend_parameters["bucket"])
        assert listed["KeyCount"] == 2
        assert first.store(keys[:4]) == [None] * 4, "they can be stored anew"


def test_capacity_bounds_what_is_reserved(make_tier: MakeTier) -> None:
    keys = random_keys(5)
    with TierMover(make_tier(capacity=3 * FRAME_BYTES + 1)) as mover:
        mover.store(keys[:3])
        assert mover.tier.reserve(keys[3:]) == [None, None]
        mover.tier.evict(keys[:1])
        assert mover.store(keys[3:4]) == [None]
        assert mover.tier.statistics().capacity == 3


def test_listing_at_the_start_is_bounded(make_tier: MakeTier) -> None:
    keys = random_keys(8)
    with TierMover(make_tier()) as mover:
        mover.store(keys)
    with TierMover(make_tier(list_limit=5)) as mover:
        assert len(list(mover.tier.committed())) == 5
        assert None not in mover.tier.probe(keys), "the others are found when asked for"


@pytest.mark.parametrize("position", [0, 9, 17, 60, 100, 127, 128, FRAME_BYTES - 1])
def test_a_damaged_byte_is_found(
    make_tier: MakeTier, seaweed: SeaweedServer, position: int
) -> None:
    [key] = random_keys(1)
    tier = make_tier()
    with TierMover(tier) as mover:
        mover.store([key])
        bucket = tier.backend_parameters["bucket"]
        name = seaweed.client.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"]
        frame = bytearray(seaweed.client.get_object(Bucket=bucket, Key=name)["Body"].read())
        frame[position] ^= 4
        seaweed.client.put_object(Bucket=bucket, Key=name, Body=bytes(frame))
        assert mover.load([key]) == ["corrupt"]
        mover.tier.evict([key])
        mover.store([key])
        assert mover.load([key]) == [block_of(key, BLOCK_BYTES)]


@pytest.mark.parametrize("size_bytes", [1, HEADER_BYTES - 1, HEADER_BYTES, FRAME_BYTES - 1])
def test_a_truncated_object_is_found(
    make_tier: MakeTier, seaweed: SeaweedServer, size_bytes: int
) -> None:
    """Also where it was cut after its size was learnt: NIXL then calls a part of it done."""
    [key] = random_keys(1)
    tier = make_tier()
    with TierMover(tier) as mover, TierMover(make_tier(list_limit=0)) as late:
        mover.store([key])
        bucket = tier.backend_parameters["bucket"]
        name = seaweed.client.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"]
        frame = seaweed.client.get_object(Bucket=bucket, Key=name)["Body"].read()
        seaweed.client.put_object(Bucket=bucket, Key=name, Body=frame[:size_bytes])
        assert mover.load([key])[0] in {"corrupt", "failed"}
        assert late.tier.probe([key]) != [None]
        assert late.load([key]) == ["corrupt"]


def test_objects_of_others_are_ignored(make_tier: MakeTier, seaweed: SeaweedServer) -> None:
    [key] = random_keys(1)
    tier = make_tier()
    with TierMover(tier) as mover:
        mover.store([key])
        bucket = tier.backend_parameters["bucket"]
        name = seaweed.client.list_objects_v2(Bucket=bucket)["Contents"][0]["Key"]
        folder = name.rpartition("/")[0]
        put = seaweed.client.put_object
        put(Bucket=bucket, Key=f"{folder}/README", Body=b"hello")
        put(Bucket=bucket, Key=f"{folder}/{'f' * 62}", Body=b"hello")
        put(Bucket=bucket, Key=f"{folder[:-2]}00/{'ab' * 32}", Body=b"in the wrong folder")
        put(Bucket=bucket, Key=f"{folder[:-2]}ab/{'ab' * 32}", Body=bytes(FRAME_BYTES + 1))
    with TierMover(make_tier()) as mover:
        assert [stored.key for stored in mover.tier.committed()] == [key]
        assert mover.tier.probe([b"\xab" * 32]) == [None]


def test_no_two_objects_ever_have_the_same_number(make_tier: MakeTier) -> None:
    """NIXL would silently take one for the other."""
    tier = make_tier()
    numbers = set()
    for seed in range(3):
        tier.open(geometry_of(BLOCK_BYTES))
        for slot in tier.reserve(random_keys(4, seed=seed)):
            assert slot is not None
            numbers.add(tier.place(slot, 1)[0].device)
            tier.release([slot])
        tier.close()
    assert len(numbers) == 12


def test_a_read_only_worker_loads_and_cannot_store(make_tier: MakeTier) -> None:
    keys = random_keys(4)
    reader = make_tier(access_key=Secret(env="TEST_S3_READER"))
    with TierMover(make_tier()) as writer, TierMover(reader) as mover:
        writer.store(keys[:2])
        mover.tier.probe(keys[:2])
        assert mover.load(keys[:2]) == [block_of(key, BLOCK_BYTES) for key in keys[:2]]
        assert None not in mover.store(keys[2:])
        assert mover.tier.statistics().reserved == 0


def test_a_block_written_and_not_committed_is_whole(make_tier: MakeTier) -> None:
    """A crash between both: the next life may use it, since S3 shows whole objects only."""
    [key] = random_keys(1)
    with TierMover(make_tier()) as mover:
        [slot] = mover.tier.reserve([key])
        assert slot is not None
        mover.fill([key])
        assert mover.move(Direction.WRITE, [slot], [FRAME_BYTES]) == [None]
    with TierMover(make_tier()) as mover:
        assert mover.load([key]) == [block_of(key, BLOCK_BYTES)]


def test_an_evicted_object_stays_until_it_was_read(make_tier: MakeTier) -> None:
    [key] = random_keys(1)
    with TierMover(make_tier()) as mover, TierMover(make_tier(list_limit=0)) as other:
        mover.store([key])
        [stored] = mover.tier.lookup([key])
        assert stored is not None
        mover.tier.pin(stored.slot)
        mover.tier.evict([key])
        assert mover.tier.probe([key]) == [None], "evicted is evicted"
        assert other.tier.probe([key]) != [None]
        assert other.load([key]) == [block_of(key, BLOCK_BYTES)]
        mover.tier.unpin(stored.slot)
        mover.tier.probe(random_keys(1, seed=5))
        assert other.load([key]) == ["failed"]


def test_what_is_stored_anew_is_not_deleted_for_its_old_self(make_tier: MakeTier) -> None:
    [key] = random_keys(1)
    with TierMover(make_tier()) as mover:
        mover.store([key])
        [stored] = mover.tier.lookup([key])
        assert stored is not None
        mover.tier.pin(stored.slot)
        mover.tier.evict([key])
        mover.store([key])
        mover.tier.unpin(stored.slot)
        mover.tier.probe(random_keys(1, seed=5))
        assert mover.load([key]) == [block_of(key, BLOCK_BYTES)]
