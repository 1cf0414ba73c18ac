"""Doors: where clients reach a deployment. A door is a transport; protocols are mounted on it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from attrs import Attribute, frozen

from commutator.contract.protocol import Example, MountedProtocol, ProtocolConfig
from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    Port,
    PositiveInt,
    PositiveSeconds,
    setting,
)

__all__ = ["Door", "DoorAddress", "DoorConfig", "FrontendConfig", "OpenDoor", "Operations"]

_Replicas = Annotated[int, Bounds(minimum=1, maximum=1000)]


_HEADER = re.compile(r"[a-z0-9-]+")
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization", "x-api-key"})
_MAX_HEADERS = 16


def _are_header_names(_: FrontendConfig, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if len(value) > _MAX_HEADERS:
        raise ValueError(f"expected at most {_MAX_HEADERS} headers, got {len(value)}")
    for name in value:
        if not _HEADER.fullmatch(name):
            raise ValueError(f'"{name}" is no header name in lower case, such as x-team')
        if name in _SECRET_HEADERS:
            raise ValueError(f"{name} holds secrets; plugins do not see it")


Operations = Literal["guarded", "open", "off"]
"""Who gets /health, /metrics, /admin/ and the page on a door: those with the permission; everybody,
but for what changes the deployment; nobody. /live and /ready are for everybody on every door."""


@frozen(kw_only=True)
class DoorConfig:
    """The options of every door; each door plugin adds its own."""

    kind: str = setting("The door plugin: how bytes get in and out.", "http")
    host: str = setting("Address to listen on.", "127.0.0.1", takes_effect="never")
    port: Port = setting(
        "Port to listen on; 0 chooses a free one, of the first door of all only.",
        8000,
        takes_effect="never",
    )
    protocols: tuple[ProtocolConfig, ...] = setting(
        "What clients speak on this door; [{kind: openai}] by default. Empty: it is for operators.",
        (),
    )
    operations: Operations = setting(
        "Who gets /health, /metrics, /admin/ and the page here: `guarded`, those with the "
        "permission (everybody, where nobody is asked who they are); `open`, everybody who reaches "
        "the door, but for what changes the deployment; `off`, nobody. All get /live and /ready.",
        "guarded",
    )


@frozen(kw_only=True)
class FrontendConfig:
    """The front-door processes, and the doors that each of them opens."""

    doors: tuple[DoorConfig, ...] = setting(
        "Where clients and operators reach the deployment. With one door its options may stand in "
        "`frontend` itself, and with `admin: {host, port}` those of a second one for operators.",
        (),
    )
    replicas: _Replicas = setting(
        "Front-door processes that share the ports.", 1, takes_effect="live"
    )
    max_concurrent_requests: PositiveInt = setting(
        "Requests served at the same time by one front-door process, whose memory this protects, "
        "some 100 KB each and what their prompts take: as many as connections. How many workers "
        "have is for `router.busy`, and requests that wait there do not count.",
        4096,
        takes_effect="live",
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait for a place; one more is answered 429.", 1024, takes_effect="live"
    )
    forward_headers: tuple[str, ...] = setting(
        "Request headers that routing policies and observers see, in lower case, such as x-team; "
        "at most 16, and 256 characters of each value.",
        (),
        validator=_are_header_names,
    )
    request_timeout_s: PositiveSeconds = setting(
        "A request that takes longer is answered 504, so that none is served for ever: longer than "
        "the longest answer, of 32,000 tokens at 10 a second. The header X-Request-Timeout-S "
        "lowers it.",
        3600.0,
        takes_effect="new requests",
    )
    max_logprobs: PositiveInt = setting(
        "Log probabilities, alternatives included, that one front-door process keeps for clients "
        "that have not read them, or want their answers whole; each takes some hundred bytes. "
        "Requests that need more end with an error.",
        8_000_000,
    )
    prompt_cache_bytes: NonNegativeInt = setting(
        "Bytes of a tokenizer cache in each front-door process, for each model: tokens of prompt "
        "prefixes, so that a shared prefix is tokenized once; 0 turns the cache off.",
        64 << 20,
    )

    @property
    def door(self) -> DoorConfig:
        """The first door: that of the clients."""
        return self.doors[0]


ConfigT = TypeVar("ConfigT", bound=DoorConfig)
ServicesT = TypeVar("ServicesT")


@frozen(kw_only=True)
class DoorAddress:
    """How people reach a door; `commutator serve` prints it."""

    url: str
    """The root that /live and /ready are below; no slash at the end."""
    api_url: str
    """The base URL that clients are configured with."""
    example: str
    """A shell command that sends a first request."""


class OpenDoor(ABC):
    """A door that listens, in one front-door process."""

    port: int
    """The TCP port, which `port: 0` lets the system choose."""

    @abstractmethod
    async def stop_accepting(self) -> None:
        """Accept no new connection; serve the requests of those that are open.

        Doors for operators alone stay as they are: who watches, sees the end.
        """

    @abstractmethod
    async def close(self) -> None:
        """Close every connection. Called once, even after an error or no ``stop_accepting``."""


class Door(ABC, Generic[ConfigT, ServicesT]):
    """What a door plugin registers: a transport. An instance has no state.

    A door listens, bounds what clients send and withhold, finds out who they are, and carries the
    bytes of the protocols that are mounted on it. ``ServicesT`` is
    ``commutator.frontend.FrontendServices``: the models, routing, limits and metrics of a
    front-door process, which all of its doors share.
    """

    serves_rpcs = False
    """Whether its routes are those of ``RPC_METHODS``; else they are all others."""

    def problems(self, config: ConfigT) -> Iterable[str]:
        """Why this machine cannot serve with ``config``, as "OPTION: what is wrong, what to do".

        Called before any process starts. It may read files; it does not check the port.
        """
        del config
        return ()

    @abstractmethod
    def needs_key(self, config: ConfigT, services: ServicesT) -> bool:
        """Whether clients of the door must prove who they are."""

    @abstractmethod
    def address(self, config: ConfigT, netloc: str, example: Example | None) -> DoorAddress:
        """How clients on this machine reach it. ``netloc`` is "HOST:PORT".

        ``example`` is that of the door's first protocol, with an empty URL; None: it has none.
        """

    @abstractmethod
    async def open(
        self,
        config: ConfigT,
        services: ServicesT,
        protocols: Sequence[MountedProtocol],
        *,
        local_socket: str | None = None,
    ) -> OpenDoor:
        """Listen with SO_REUSEPORT: the processes of a deployment share the port.

        ``local_socket`` is the path of a Unix socket on which it answers as well, and where the
        supervisor requests /live and /ready over HTTP: 200 as soon as the door answers, and while
        every model has a worker (``services.dispatcher.ready()``).
        Only the first door of a process gets one. Raises ConfigError when the address or the
        certificate cannot be used, or when two protocols claim the same route.
        """
