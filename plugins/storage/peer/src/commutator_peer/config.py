"""The options of the `peer` tier."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, frozen

from commutator import Memory, PositiveInt, PositiveSeconds, TierConfig, setting
from commutator.contract.tier import ExportOptions

_EVERY_INTERFACE = {"*", "0.0.0.0", "::"}  # noqa: S104 - refused without advertise


def _is_endpoint(config: PeerTierConfig, attribute: Attribute[Any], value: str | None) -> None:
    if value is None:
        return
    try:
        host, _ = _endpoint(value)
    except ValueError:
        raise ValueError(f'{attribute.name}: expected tcp://HOST:PORT, got "{value}"') from None
    if host in _EVERY_INTERFACE and config.advertise is None:
        raise ValueError(
            f"{attribute.name}: others cannot reach {host}; set advertise to this machine's name"
        )


def _endpoint(value: str) -> tuple[str, int]:
    """Host and port, 0 for any. Raises ValueError."""
    scheme, _, rest = value.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host:
        raise ValueError(value)
    return host.strip("[]"), 0 if port == "*" else int(port)


@frozen(kw_only=True)
class PeerTierConfig(TierConfig):
    """Which workers to ask, and how this worker lends its own blocks."""

    memory = Memory.DRAM
    asks_peers = True

    peers: tuple[str, ...] = setting(
        "Addresses of workers that lend blocks, such as tcp://10.0.0.7:5600, in addition to those "
        "in the registry.",
        (),
    )
    max_asked: PositiveInt = setting(
        "Most peers that one look-up asks: up to half of them those that lent blocks of such "
        "prompts, or any, last; the others in turn.",
        8,
    )
    ask_timeout_s: PositiveSeconds = setting(
        "A peer that does not answer in this time counts as empty.", 0.2
    )
    max_silences: PositiveInt = setting(
        "After this many consecutive look-ups without an answer, a peer is not asked for a while, "
        "longer each time.",
        2,
    )
    advertise: str | None = setting(
        "This machine's name or address for other machines; required if it listens on all "
        "interfaces.",
        None,
        of_host=True,
    )
    listen: str | None = setting(
        "Address at which other workers ask for the blocks in this worker's host memory; null: it "
        "lends nothing. Port * chooses a free port. Host * is every interface; set advertise, too.",
        "tcp://127.0.0.1:*",
        validator=_is_endpoint,
        of_host=True,
    )
    lease_s: PositiveSeconds = setting(
        "A lent block stays in its slot for this time unless its reader releases it.", 30.0
    )
    max_lent_blocks: PositiveInt = setting(
        "Largest number of blocks lent at a time; a lent block cannot be evicted.", 4096
    )

    @property
    def lends(self) -> bool:
        return self.listen is not None

    def __attrs_post_init__(self) -> None:
        if self.write != "through" or self.admission != type(self.admission)():
            raise ValueError(
                "write and admission have no effect, because nothing is ever stored in other "
                "workers; remove them"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the exporters in ``peers``, as "host:port"."""
        return tuple(peer.removeprefix("tcp://") for peer in self.peers)

    def export_options(self) -> ExportOptions | None:
        """None when this worker lends nothing."""
        if self.listen is None:
            return None
        host, port = _endpoint(self.listen)
        return ExportOptions(
            host="" if host == "*" else host,
            port=port,
            advertise=self.advertise,
            lease_s=self.lease_s,
            max_leased_blocks=self.max_lent_blocks,
        )
