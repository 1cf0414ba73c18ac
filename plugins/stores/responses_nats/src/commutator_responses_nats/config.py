"""The options of the response store `nats`."""

from __future__ import annotations

from typing import Annotated

from attrs import frozen

from commutator import Bounds, PositiveSeconds, setting
from commutator.contract.response_store import ResponseStoreConfig
from commutator_nats.config import NatsServers


@frozen(kw_only=True)
class NatsStoreConfig(NatsServers, ResponseStoreConfig):
    """In NATS JetStream (2.9 or later), where the front doors of all hosts find them.

    `runtime.secret` plays no part here: who reaches the servers with the credentials reads what is
    kept. Give deployments that must not read each other's responses accounts of their own.
    """

    copies: Annotated[int, Bounds(minimum=1, maximum=5)] = setting(
        "Servers of the NATS cluster that keep each response; with 3, one of them may be lost.", 1
    )
    timeout_s: PositiveSeconds = setting(
        "The longest that reading or keeping responses takes; then clients are answered 503.", 5.0
    )
