"""Protocols: what clients say and hear on a door, such as OpenAI's API over HTTP."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from attrs import frozen

from commutator.contract.answer import Failure
from commutator.contract.settings import setting

__all__ = [
    "RPC_METHODS",
    "DoorFacts",
    "Example",
    "MountedProtocol",
    "Protocol",
    "ProtocolConfig",
    "Route",
]

RPC_METHODS = frozenset({"RPC", "RPC_GET", "RPC_STREAM"})
"""Of routes whose path is "/PACKAGE.SERVICE/METHOD": a message and its answer; the same that only
looks; and a stream, of which each message is a call of its own, all of them at the same time."""


@frozen(kw_only=True)
class ProtocolConfig:
    """Options of every entry of a door's `protocols`; each protocol plugin adds its own."""

    kind: str = setting("The protocol plugin: what clients of this door speak.")


ConfigT = TypeVar("ConfigT", bound=ProtocolConfig)
ServicesT = TypeVar("ServicesT")


@frozen(kw_only=True)
class Route:
    """One request that clients can make."""

    method: str
    """"GET", "POST", "DELETE", or "WEBSOCKET": each message of a client is a call of its own then,
    and each line that answers it a message. They are answered one after another. Or one of
    ``RPC_METHODS``, which doors of another transport have; each door takes its own."""
    path: str
    """Such as "/v1/models/{id:.+}": names in braces, with a regular expression after a colon."""
    handle: Callable[[Any], Awaitable[None]]
    """Answers one ``commutator.frontend.Call``: a coroutine function that reads what it needs, and
    ends with an answer or raises. ``commutator.frontend.answer`` does all but reading for those
    that generate. What it raises is answered by ``MountedProtocol.failed``."""
    is_mine: Callable[[Mapping[str, str]], bool] | None = None
    """Tells callers of this protocol by their headers where several protocols share the route; of
    those, one may leave it None, and gets everybody else."""
    yields: bool = False
    """Whether another protocol of the door that has the same route answers it instead: for what a
    protocol only hands on."""


@frozen(kw_only=True)
class Example:
    """How people try a protocol."""

    api_url: str
    """The base URL that its clients are configured with."""
    path: str
    """Of a first request, a POST."""
    body: Mapping[str, Any] | str
    """Its JSON, or its text, if ``content_type`` is another."""
    content_type: str = "application/json"
    """What the body is."""
    rpc: tuple[str, Mapping[str, Any]] | None = None
    """Where it has an RPC, "PACKAGE.SERVICE/METHOD" and the JSON of a first message."""

    @property
    def text(self) -> str:
        """The body as it is sent."""
        return self.body if isinstance(self.body, str) else json.dumps(self.body)


@frozen(kw_only=True)
class DoorFacts:
    """What a protocol may say about the door that it is mounted on."""

    needs_key: bool
    """Whether clients must prove who they are."""
    operations: bool
    """Whether /health, /metrics and /admin/ are on the same door."""


class MountedProtocol(ABC):
    """A protocol on one door of one front-door process."""

    session_headers: Sequence[str] = ("x-session-id",)
    """Headers, in lower case, in which its clients name their session where the request's body does
    not; the first that is sent counts."""
    failed_type: str = "application/json"
    """The content type of what ``failed`` returns."""
    descriptors: Sequence[bytes] = ()
    """Serialized ``FileDescriptorProto`` of its RPCs, each after those that it imports."""

    @abstractmethod
    def routes(self) -> Sequence[Route]:
        """What it answers."""

    @abstractmethod
    def failed(self, failure: Failure) -> bytes:
        """The body of an answer that is no success, of the type ``failed_type``."""

    def failed_message(self, failure: Failure) -> bytes:
        """The same as a line, for the client of a WebSocket; as a message, for that of a stream."""
        return self.failed(failure)

    async def close(self) -> None:
        """Give up what it holds. Called once, after the last request."""


class Protocol(ABC, Generic[ConfigT, ServicesT]):
    """What a protocol plugin registers. An instance has no state: several processes use it.

    ``ServicesT`` is ``commutator.frontend.FrontendServices``. Installing one mounts nothing: a door
    has the protocols that its `protocols` list.
    """

    def problems(self, config: ConfigT) -> Iterable[str]:
        """Why ``config`` cannot be served on this machine, as "OPTION: what, what to do"."""
        del config
        return ()

    @abstractmethod
    def mount(self, config: ConfigT, services: ServicesT, door: DoorFacts) -> MountedProtocol:
        """Make what answers on one door. Raises ConfigError.

        Where a door has several protocols, it is also called before the start, to compare their
        routes, with ``services`` that have no attributes yet: keep them for the requests.
        """

    @abstractmethod
    def example(self, url: str, model: str) -> Example:
        """A first request to the door at ``url`` (no slash at the end) about ``model``."""
