"""The operations of kind `console`."""

from __future__ import annotations

from collections.abc import Iterator

from commutator.contract.operations import (
    Operations,
    OperationsContext,
    OperationsDoor,
    OperationsRoute,
)
from commutator_console.live import LiveFeed, live_routes
from commutator_console.page import page_routes

__all__ = ["Console"]


class Console(Operations):
    """The live view, and the page that shows it. All doors of a process share one feed."""

    def __init__(self, context: OperationsContext) -> None:
        self.feed = LiveFeed(context.services, context.local_socket)

    def routes(self, door: OperationsDoor) -> Iterator[OperationsRoute]:
        yield from live_routes(self.feed)
        yield from page_routes(chat=door.serves_clients, needs_key=door.needs_key)
