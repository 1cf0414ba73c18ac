"""What an operator asks about the tiers, and does to them, through the real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.kv_rig import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    KvRig,
    chain,
    content,
    setups,
    wait_for,
)

from commutator.contract.worker import KvPrompt, TierContents
from commutator.errors import EngineError
from commutator_engine_kit.kv.admin import KvAdmin, LocatedPrompt

KEYS = chain(1, 6)
DRAM = {"kind": "dram", "capacity": 4 * BLOCK_BYTES, "huge_pages": "off"}


def nvme(folder: Path) -> dict[str, Any]:
    return {"kind": "nvme", "path": str(folder), "capacity": 32 * BLOCK_BYTES}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[KvRig]:
    with KvRig(setups(DRAM, nvme(tmp_path))) as made:
        made.store(KEYS)
        yield made


def admin(rig: KvRig, *, on_device: int = 0) -> KvAdmin:
    def locate(question: KvPrompt) -> LocatedPrompt:
        keys = chain(question.token_ids[0], len(question.token_ids) // BLOCK_TOKENS)
        return LocatedPrompt(keys, on_device, BLOCK_TOKENS)

    return KvAdmin(rig.connector, locate)


def damage(folder: Path, key: bytes) -> None:
    """Change one byte of a stored block where it lies."""
    path = folder / "segment-00000"
    data = bytearray(path.read_bytes())
    at = data.index(content(key))
    data[at + 100] ^= 1
    path.write_bytes(data)


def test_contents_are_counted_in_blocks_and_bytes(rig: KvRig) -> None:
    dram, nvme = admin(rig).contents()
    assert dram == TierContents(
        tier="dram",
        medium="CPU",
        up=True,
        blocks=4,
        pinned=0,
        bytes=4 * BLOCK_BYTES,
        capacity_blocks=4,
    )
    assert (nvme.blocks, nvme.bytes) == (6, 6 * BLOCK_BYTES)


def test_contents_begin_with_the_device_if_the_engine_counts_it(rig: KvRig) -> None:
    def locate(question: KvPrompt) -> LocatedPrompt:
        raise NotImplementedError

    device = TierContents(
        tier="device",
        medium="GPU",
        up=True,
        blocks=5,
        pinned=2,
        bytes=5 * BLOCK_BYTES,
        capacity_blocks=8,
    )
    first, *tiers = KvAdmin(rig.connector, locate, lambda: device).contents()
    assert first == device
    assert [tier.tier for tier in tiers] == ["dram", "nvme"]


def test_statistics_count_each_edge(rig: KvRig) -> None:
    told = admin(rig).statistics()
    assert [tier.name for tier in told.tiers] == ["dram", "nvme"]
    assert told.edge("device", "nvme").stored == 6


def test_an_explanation_names_the_tier_of_each_block_and_what_is_missing(rig: KvRig) -> None:
    told = admin(rig, on_device=2).explain(KvPrompt(token_ids=[1] * 8 * BLOCK_TOKENS))
    assert told.prompt_tokens == 8 * BLOCK_TOKENS
    blocks = told.blocks
    assert [block.reusable for block in blocks] == [True] * 6 + [False] * 2
    assert [block.reason for block in blocks[:2]] == ["on the device"] * 2
    assert all(block.tier in ("dram", "nvme") for block in blocks[2:6])
    assert [block.reason for block in blocks[6:]] == [
        "never offered",
        "a block before it is missing",
    ]
    assert blocks[0].key == KEYS[0].hex()


def test_evict_empties_one_tier_or_all(rig: KvRig) -> None:
    asked = admin(rig)
    assert asked.evict("dram") == {"dram": 4}
    assert rig.load(KEYS) == 6  # from the disk
    rig.settle()
    assert asked.evict() == {"dram": rig.tier("dram").published, "nvme": 6}
    assert rig.load(KEYS) == 0
    wait_for(lambda: asked.contents()[1].bytes == 0)


def test_verify_finds_the_damaged_block_and_nothing_else(rig: KvRig, tmp_path: Path) -> None:
    asked = admin(rig)
    whole = {check.tier: check for check in asked.verify()}
    assert (whole["nvme"].intact, whole["nvme"].corrupt) == (6, 0)
    assert (whole["dram"].intact, whole["dram"].problem) == (4, None)
    asked.evict("dram")
    damage(tmp_path, KEYS[3])
    (found,) = asked.verify("nvme")
    assert (found.blocks, found.intact, found.corrupt) == (6, 5, 1)
    assert found.bytes == 6 * BLOCK_BYTES
    assert rig.load(KEYS) == 3  # nothing is served from it or from what lies behind it
    assert rig.tier("nvme").removed == {"found corrupt by verify": 1}
    assert rig.tier("nvme").loads.get("corrupt", 0) == 0
    (again,) = asked.verify("nvme")
    assert (again.blocks, again.corrupt) == (5, 0)


def test_verify_goes_on_beside_loads(rig: KvRig) -> None:
    asked, told = admin(rig), []
    checks = [threading.Thread(target=lambda: told.append(asked.verify()))]
    checks[0].start()
    for _ in range(5):
        assert rig.load(KEYS) == 6
    checks[0].join(20)
    rig.settle()
    assert [check.corrupt for check in told[0]] == [0, 0]


def test_verify_of_a_tier_that_is_closed_tells_why(rig: KvRig) -> None:
    rig.connector.close()
    told = admin(rig).verify("nvme")
    assert told[0].problem == "the tier is down"
    assert told[0].intact == 0


@pytest.mark.parametrize("question", ["evict", "verify"])
def test_an_unknown_tier_is_refused(rig: KvRig, question: str) -> None:
    with pytest.raises(EngineError, match="no tier 'tape' here; the tiers are: dram, nvme"):
        getattr(admin(rig), question)("tape")


def test_a_prompt_that_will_be_asked_for_comes_up(tmp_path: Path) -> None:
    dram = DRAM | {"capacity": 32 * BLOCK_BYTES, "write": "on_evict"}
    with KvRig(setups(dram, nvme(tmp_path))) as rig:
        rig.store(KEYS)
        assert rig.tier("dram").published == 0
        prompt = KvPrompt(token_ids=[1] * len(KEYS) * BLOCK_TOKENS)
        admin(rig, on_device=len(KEYS)).prefetch(prompt)
        assert rig.tier("dram").prefetched == {}, "all of it is on the device"
        admin(rig, on_device=2).prefetch(prompt)
        wait_for(lambda: rig.tier("dram").prefetched == {"brought": len(KEYS) - 2})
        rig.settle()
        assert rig.load(KEYS) == len(KEYS)
        assert rig.tier("dram").prefetched == {
            "brought": len(KEYS) - 2,
            "used": len(KEYS) - 2,
        }


def test_questions_to_shared_tiers_leave_nothing_behind(tmp_path: Path) -> None:
    (setup,) = setups(nvme(tmp_path))
    setup.tier.shared = True
    with KvRig([setup]) as rig:
        prompt = KvPrompt(token_ids=list(range(3 * BLOCK_TOKENS)))
        admin(rig).prefetch(prompt)
        admin(rig).explain(prompt)
        assert not rig.connector.lookups._lookups
