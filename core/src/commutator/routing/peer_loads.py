"""What other front doors have in flight, as far as it was heard of lately. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from commutator.routing.contract import WorkerLoad

__all__ = ["PeerLoads"]


@frozen
class _Heard:
    number: int
    at_s: float
    loads: Mapping[str, WorkerLoad]


@define
class PeerLoads:
    """Keeps each peer's last word, and forgets it after ``silence_s`` without another.

    A word is everything that the peer has in flight, so words may be lost, come twice or overtake
    each other: the next one that arrives puts it right. Times are seconds of one monotonic clock.
    """

    silence_s: float
    _heard: dict[str, _Heard] = field(factory=dict)

    def hear(self, peer: str, number: int, loads: Mapping[str, WorkerLoad], now_s: float) -> bool:
        """A word of ``peer``, its ``number``-th. False when it is older than one already heard."""
        known = self._heard.get(peer)
        if known is not None and known.number >= number:
            return False
        self._heard[peer] = _Heard(number, now_s, loads)
        return True

    def forget(self, peer: str) -> bool:
        """``peer`` said that it has stopped. False when nothing was known of it."""
        return self._heard.pop(peer, None) is not None

    def expire(self, now_s: float) -> list[str]:
        """Forget who has been silent for too long; returns their names."""
        oldest_s = now_s - self.silence_s
        silent = [peer for peer, heard in self._heard.items() if heard.at_s <= oldest_s]
        for peer in silent:
            del self._heard[peer]
        return silent

    @property
    def count(self) -> int:
        """How many peers are heard of."""
        return len(self._heard)

    def total(self) -> dict[str, WorkerLoad]:
        """What all peers together have in flight, by worker."""
        total: dict[str, WorkerLoad] = {}
        for heard in self._heard.values():
            for worker_id, load in heard.loads.items():
                known = total.get(worker_id)
                total[worker_id] = load if known is None else known + load
        return total
