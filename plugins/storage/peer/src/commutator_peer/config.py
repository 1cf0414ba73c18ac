"""The options of the `peer` tier."""

from __future__ import annotations

from attrs import frozen

from commutator import TierConfig, setting
from commutator.schema import PositiveInt, PositiveSeconds

__all__ = ["PeerTierConfig"]


@frozen(kw_only=True)
class PeerTierConfig(TierConfig):
    """Whom to ask, and for how long."""

    peers: tuple[str, ...] = setting(
        "Addresses of workers that export their memory, such as tcp://10.0.0.7:5600, beside those "
        "that the registry knows.",
        (),
    )
    ask_timeout_s: PositiveSeconds = setting(
        "A peer that does not answer in this time is taken to have nothing.", 0.2
    )
    max_silences: PositiveInt = setting(
        "After so many missed answers in a row a peer is left alone for a while, longer each time.",
        2,
    )
