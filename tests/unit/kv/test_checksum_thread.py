"""Blocks so large that they are checked on another thread while others are moved."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from tests.support.kv_rig import KvRig, chain, setups

from commutator.kv import checksum, checksum_thread
from commutator.kv.arena import bytes_at
from commutator.kv.staging import Staging
from commutator.testing import damage
from commutator.transfer import Span

LARGE = 256 << 10


@pytest.mark.parametrize("block_bytes", [1000, LARGE])
@pytest.mark.parametrize("alone", [False, True], ids=["another CPU", "one CPU"])
def test_sums_are_those_of_the_blocks(
    monkeypatch: pytest.MonkeyPatch, block_bytes: int, alone: bool
) -> None:
    monkeypatch.setattr(checksum_thread, "_another_cpu", lambda: not alone)
    threads = []
    added_up = checksum_thread._sums

    def noted(spans: Sequence[Span]) -> list[int]:
        threads.append(threading.get_ident())
        return added_up(spans)

    monkeypatch.setattr(checksum_thread, "_sums", noted)
    memory = Staging(block_bytes, 5)
    blocks = memory.arena
    for number in range(5):
        bytes_at(blocks.span(number))[:] = bytes([number + 1]) * block_bytes
    sums = checksum_thread.checksums_of([blocks.span(number) for number in range(5)])
    assert sums() == [checksum(bytes([number + 1]) * block_bytes) for number in range(5)]
    elsewhere = threads[0] != threading.get_ident()
    assert elsewhere is (block_bytes == LARGE and not alone)


def test_a_changed_byte_of_a_large_block_is_found() -> None:
    (setup,) = setups({"kind": "dram", "capacity": "20MB", "huge_pages": "off"})
    keys = chain(1, 12)
    with KvRig([setup], blocks=24, block_bytes=LARGE) as rig:
        rig.store(keys)
        assert rig.load(keys) == 12
        (stored,) = setup.tier.lookup(keys[9:10])
        assert stored is not None
        damage(setup.tier, stored, LARGE - 1)
        assert rig.load(keys) == 9
        assert rig.tier("dram").loads == {"loaded": 12 + 11, "corrupt": 1}
