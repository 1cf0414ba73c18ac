"""The options of the `peer` tier."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from attrs import Attribute, frozen

from commutator import TierConfig, setting
from commutator.schema import PositiveInt, PositiveSeconds

__all__ = ["PeerTierConfig"]

_EVERY_INTERFACE = {"*", "0.0.0.0", "::"}  # noqa: S104 - these are refused


def _is_endpoint(config: PeerTierConfig, attribute: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    url = urlsplit(value)
    if url.scheme != "tcp" or ":" not in url.netloc:
        raise ValueError(f'{attribute.name}: expected tcp://HOST:PORT, got "{value}"')
    host = url.netloc.rpartition(":")[0].strip("[]")
    if host in _EVERY_INTERFACE and config.advertise is None:
        raise ValueError(
            f"{attribute.name}: others cannot ask at {host}; set advertise to this machine's name"
        )


@frozen(kw_only=True)
class PeerTierConfig(TierConfig):
    """Whom to ask, and for how long; and where to be asked."""

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
    advertise: str | None = setting(
        "This machine's name or address for workers on others; needed when it listens on all.", None
    )
    listen: str | None = setting(
        "Where others ask for the blocks in the worker's own host memory; null: it lends nothing. "
        "Port * chooses a free one.",
        "tcp://127.0.0.1:*",
        validator=_is_endpoint,
    )
    lease_s: PositiveSeconds = setting(
        "So long a block that was asked for stays where it is, if nobody reads it.", 30.0
    )
    max_lent_blocks: PositiveInt = setting(
        "Of all readers together: what is lent cannot be evicted.", 4096
    )

    def __attrs_post_init__(self) -> None:
        if self.write != "through" or self.admission != type(self.admission)():
            raise ValueError(
                "write and admission are without effect, as nothing is ever stored in other "
                "workers; remove them"
            )
