"""Asks shared tiers for a prompt's blocks before its load is planned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from attrs import define

from commutator.kv.keys import BlockKey
from commutator.kv.service_jobs import probe_job
from commutator.kv.service_state import Outbox
from commutator.kv.tier import Stored
from commutator.kv.tier_setup import TierSetup
from commutator.kv.tier_thread import JobUrgency, TierThread

__all__ = ["Probes"]

_TIMEOUT_S = 1.0
"""After so long without an answer a prompt is computed."""


@define
class _Probe:
    waiting: int
    deadline_s: float


class Probes:
    """Each load is probed for once. Called with the lock of ``outbox`` held.

    ``on_found`` is told a tier and what it has.
    """

    def __init__(
        self,
        setups: Sequence[TierSetup],
        threads: Sequence[TierThread],
        outbox: Outbox,
        on_found: Callable[[int, Sequence[Stored]], None],
    ) -> None:
        self._setups = setups
        self._threads = threads
        self._outbox = outbox
        self._on_found = on_found
        self._probes: dict[str, _Probe] = {}

    def must_wait(self, load_id: str, keys: Sequence[BlockKey], known: int, now_s: float) -> bool:
        """Whether an answer is still to come; asks when that was not done yet.

        ``known``: so many of ``keys`` are found without asking.
        """
        probe = self._probes.get(load_id)
        if probe is not None:
            return probe.waiting > 0 and now_s < probe.deadline_s
        tiers = [
            number
            for number, setup in enumerate(self._setups)
            if setup.tier.shared and self._threads[number].usable
        ]
        if known >= len(keys) or not tiers:
            return False
        probe = self._probes[load_id] = _Probe(len(tiers), now_s + _TIMEOUT_S)
        for number in tiers:
            job = probe_job(keys, partial(self._answered, number, probe))
            self._threads[number].submit(JobUrgency.LOAD, job)
        return True

    @property
    def count(self) -> int:
        """How many answers are awaited, or kept for their load."""
        return len(self._probes)

    def forget(self, load_id: str) -> None:
        """The load was planned, or nobody wants it any more."""
        self._probes.pop(load_id, None)

    def _answered(self, tier: int, probe: _Probe, found: Sequence[Stored]) -> None:
        with self._outbox:
            probe.waiting -= 1
            if found:
                self._on_found(tier, found)
            self._outbox.poke()
