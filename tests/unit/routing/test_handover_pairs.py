"""Pairs that cannot hand KV over, in a fleet of a thousand workers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import cast

import pytest
from attrs import evolve

from commutator.contract.disagg import HandoverStyle
from commutator.contract.worker import KvTransferInfo, Role, WorkerRecord
from commutator.plugins import PluginHost
from commutator.routing.disagg.prefill_pool import WorkerCompatibility
from commutator_replay.fleet import virtual_live_worker

INFO = KvTransferInfo(protocol="p", identity="model", block_size=16, token_bytes=64)


class CountingStyle:
    """Hands over between equal identities, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def mismatch(self, prefill: KvTransferInfo, decode: KvTransferInfo) -> str | None:
        self.asked += 1
        return None if prefill.identity == decode.identity else "other models"


def compatibility(style: CountingStyle) -> WorkerCompatibility:
    found = WorkerCompatibility({}, PluginHost())
    found._styles["virtual"] = cast("HandoverStyle", style)
    return found


def fleet(count: int, *, foreign: int = 0) -> Iterator[WorkerRecord]:
    """Half of them prefill; the last ``foreign`` ones decode for another model's KV."""
    for number in range(count):
        role = Role.PREFILL if number % 2 else Role.DECODE
        record = virtual_live_worker(f"w{number:04}", role=role).record
        identity = "other" if number >= count - foreign and role is Role.DECODE else "model"
        info = evolve(INFO, identity=identity, address=f"10.0.0.1:{number}")
        yield evolve(record, info=evolve(record.info, handover=info))


@pytest.mark.security
def test_a_thousand_workers_are_compared_by_class() -> None:
    style = CountingStyle()
    assert not list(compatibility(style).incompatible(fleet(1000)))
    assert style.asked == 1


@pytest.mark.security
def test_as_many_pairs_are_compared_as_are_shown() -> None:
    style = CountingStyle()
    shown = list(islice(compatibility(style).incompatible(fleet(1000, foreign=1000)), 100))
    assert len(shown) == 100
    assert style.asked <= 101


def test_every_incompatible_pair_is_named() -> None:
    found = list(compatibility(CountingStyle()).incompatible(fleet(8, foreign=4)))
    assert {(pair.prefill_worker, pair.decode_worker) for pair in found} == {
        (f"w{prefill:04}", f"w{decode:04}") for prefill in (1, 3, 5, 7) for decode in (4, 6)
    }
