"""Event buses: how KV events get from the hosts of workers to the front doors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import ClassVar, Protocol

from attrs import frozen

from commutator.contract.settings import setting
from commutator.contract.worker import EventSource

__all__ = [
    "EventBus",
    "EventBusConfig",
    "EventChannel",
    "EventOutlet",
    "EventStream",
    "KeptMessages",
    "Message",
]

Message = tuple[int, bytes]
"""A message's sequence number, and its body: KV events, which a bus does not look into.

Numbers begin at 0 and have no gap. An empty body is a message, too.
"""


@frozen(kw_only=True)
class EventBusConfig:
    """Options of every event bus; each event bus plugin adds its own."""

    kind: str = setting("The event bus plugin.")


@frozen(kw_only=True)
class EventStream:
    """Names the messages of one data-parallel rank of one start of a worker."""

    model: str
    """The `models` entry that the worker serves."""
    worker_id: str
    """The worker."""
    instance: str
    """As ``WorkerRecord.instance``: another start of the worker is another stream."""
    rank: int = 0
    """The data-parallel rank; 0, too, for a source that publishes for all ranks."""


class KeptMessages(Protocol):
    """The last messages of a stream, at the worker's host, for readers that missed some."""

    @property
    def end(self) -> int:
        """The sequence number of the next message."""

    def since(self, first: int) -> Iterator[Message]:
        """Every kept message from number ``first`` on. Read it without awaiting in between."""


class EventOutlet(ABC):
    """Where a worker's host sends the messages of one stream. Used from one event loop."""

    source: EventSource
    """What ``EventBus.subscribe`` takes to read the stream, in any process of the cluster."""

    @abstractmethod
    def send(self, sequence: int, body: bytes) -> None:
        """Send a message, or drop it when the bus is away or full: it can still be replayed.

        Never blocks. ``body`` may be larger than what the bus carries at once: then it is split.
        """

    @abstractmethod
    async def close(self) -> None:
        """End the stream. Idempotent."""


class EventChannel(ABC):
    """One reader's messages of one stream, as the bus delivers them. Used from one event loop.

    Messages may be missing, come twice, or late; the caller puts them in order, and asks for what
    is missing. Only messages that the stream's own outlet sent come, unchanged, or none.
    """

    numbers_start_again: ClassVar[bool] = False
    """Whether a stream may begin anew at 0, as that of an engine's own socket that restarts."""

    @abstractmethod
    async def receive(self) -> Sequence[Message]:
        """Wait for messages; returns one, and a few more if they are there already.

        Called again and again by one task. What a reader does not receive in time is dropped.
        """

    @abstractmethod
    async def missed(self) -> None:
        """Return once the subscription is in force, and again when messages may have been missed.

        That is: after each interruption of the connection, and when the bus dropped messages for
        this reader. Called again and again by one task.
        """

    @abstractmethod
    def replay(self, first: int, timeout_s: float) -> AsyncGenerator[Sequence[Message], None]:
        """Yield every message that is still kept, from number ``first`` on, in order.

        Raises EngineUnavailableError when nothing comes for ``timeout_s`` seconds before the end.
        """

    @abstractmethod
    async def close(self) -> None:
        """Unsubscribe. No other method is called afterwards, nor runs."""


class EventBus(ABC):
    """Carries KV events from the hosts of workers to the front doors.

    The factory of a plugin makes one in each supervisor, which publishes, and one in each front
    door, which subscribes. It is used from one event loop, and connects when it is first needed; a
    bus that cannot be reached stops neither workers nor requests, only the prefix index grows old.
    """

    reads_engines: ClassVar[bool] = False
    """Whether front doors can also read engines' own sockets, where other hosts reach them."""

    async def publish(self, stream: EventStream, kept: KeptMessages) -> EventOutlet | None:
        """Offer a stream to readers. The outlet also answers replays, from ``kept``.

        None, as here: front doors read the engine's own source, and nothing passes through the
        worker's host.
        """
        return None

    @abstractmethod
    def subscribe(
        self, source: EventSource, on_malformed: Callable[[Exception], None]
    ) -> EventChannel:
        """Read a stream. ``on_malformed`` is called for whatever comes and is none of its messages.

        Raises ValueError when ``source`` is none of this bus.
        """

    @abstractmethod
    async def close(self) -> None:
        """Disconnect, after every outlet and channel was closed. Idempotent."""
