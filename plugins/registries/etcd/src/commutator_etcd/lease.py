"""When the holder of a lease renews it, and until when the lease certainly lives. Pure."""

from __future__ import annotations

from math import ceil

from attrs import evolve, frozen

__all__ = ["LeaseHolder", "whole_ttl_s"]

_SHORTEST_S = 2
"""Seconds. etcd itself makes shorter leases longer: 1.5 times its election timeout."""
_LEAST_PATIENCE_S = 0.2


def whole_ttl_s(ttl_s: float) -> int:
    """The seconds that etcd is asked for: whole ones, at least 2."""
    return max(_SHORTEST_S, ceil(ttl_s))


@frozen
class LeaseHolder:
    """What the holder of one lease knows. Times are seconds of one monotonic clock.

    etcd counts from when it received the last renewal, which is after that was sent: until
    ``deadline_s`` the lease lives, whatever happened on the way. Later it may live or not; only
    etcd's answer tells.
    """

    ttl_s: float
    """How long a renewal lasts."""
    confirmed_s: float
    """When the last renewal was *sent* that etcd answered."""
    longest_s: float
    """How long to wait for one answer at most."""

    @property
    def deadline_s(self) -> float:
        """Until when the lease certainly lives."""
        return self.confirmed_s + self.ttl_s

    def patience_s(self, now_s: float) -> float | None:
        """How long to wait for the answer to a renewal that is sent now.

        Half of what remains, so that there is time to ask another member. None: nothing remains,
        so that this attempt is the last before the lease is reported as unknown.
        """
        remaining_s = self.deadline_s - now_s
        if remaining_s <= 0:
            return None
        return min(self.longest_s, max(_LEAST_PATIENCE_S, remaining_s / 2))

    def confirmed(self, sent_s: float) -> LeaseHolder:
        """A renewal that was sent then was answered."""
        return evolve(self, confirmed_s=max(self.confirmed_s, sent_s))
