"""Front doors: how clients of one protocol reach the models of a deployment."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Annotated, Any, Generic, TypeVar

from attrs import Attribute, frozen

from commutator.contract.settings import (
    Bounds,
    NonNegativeInt,
    Port,
    PositiveInt,
    PositiveSeconds,
    setting,
)

__all__ = [
    "AdminConfig",
    "Frontend",
    "FrontendAddress",
    "FrontendConfig",
    "OpenFrontend",
]

_Replicas = Annotated[int, Bounds(minimum=1, maximum=1000)]


_HEADER = re.compile(r"[a-z0-9-]+")
_SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
_MAX_HEADERS = 16


def _are_header_names(_: FrontendConfig, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    if len(value) > _MAX_HEADERS:
        raise ValueError(f"expected at most {_MAX_HEADERS} headers, got {len(value)}")
    for name in value:
        if not _HEADER.fullmatch(name):
            raise ValueError(f'"{name}" is no header name in lower case, such as x-team')
        if name in _SECRET_HEADERS:
            raise ValueError(f"{name} holds secrets; plugins do not see it")


@frozen(kw_only=True)
class AdminConfig:
    """An address of its own for /metrics and /health, where nobody needs a key."""

    host: str = setting("Address to listen on: a network that clients do not reach.", "127.0.0.1")
    port: Annotated[int, Bounds(minimum=1, maximum=65535)] = setting("Port to listen on.")


@frozen(kw_only=True)
class FrontendConfig:
    """The options of every front door; a plugin's subclass adds those of its protocol."""

    kind: str = setting("The front-door plugin: the protocol that clients speak.", "openai")
    host: str = setting("Address to listen on.", "127.0.0.1")
    port: Port = setting("Port to listen on; 0 chooses a free one.", 8000)
    admin: AdminConfig | None = setting(
        "Serve /metrics and /health on this address instead; /live and /ready on both.", None
    )
    replicas: _Replicas = setting("Front-door processes that share the port.", 1)
    max_concurrent_requests: PositiveInt = setting(
        "Requests served at the same time by one front-door process, which this protects; requests "
        "that wait for a worker (`router.busy`) do not count.",
        256,
    )
    max_queued_requests: NonNegativeInt = setting(
        "Requests that may wait for a place; one more is answered 429.", 1024
    )
    forward_headers: tuple[str, ...] = setting(
        "Request headers that routing policies and observers see, in lower case, such as x-team; "
        "at most 16, and 256 characters of each value.",
        (),
        validator=_are_header_names,
    )
    request_timeout_s: PositiveSeconds = setting(
        "A request that takes longer is answered 504; the header X-Request-Timeout-S lowers it.",
        600.0,
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


ConfigT = TypeVar("ConfigT", bound=FrontendConfig)
ServicesT = TypeVar("ServicesT")


@frozen(kw_only=True)
class FrontendAddress:
    """How people reach a front door; `commutator serve` prints it."""

    url: str
    """The root that /live, /ready, /health and /metrics are below; no slash at the end."""
    api_url: str
    """The base URL that clients are configured with."""
    example: str
    """A shell command that sends a first request."""


class OpenFrontend(ABC):
    """A front door that listens, in one front-door process."""

    port: int
    """The TCP port, which `port: 0` lets the system choose."""

    @abstractmethod
    async def stop_accepting(self) -> None:
        """Accept no new connection; serve the requests of those that are open."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection. Called once, even after an error or no ``stop_accepting``."""


class Frontend(ABC, Generic[ConfigT, ServicesT]):
    """One front-door protocol. An instance has no state: several processes use it.

    ``ServicesT`` is ``commutator.frontend.FrontendServices``: the models, routing, limits and
    metrics of a front-door process.
    """

    def problems(self, config: ConfigT) -> Iterable[str]:
        """Why this machine cannot serve with ``config``, as "OPTION: what is wrong, what to do".

        Called before any process starts. It may read files; it does not check the port.
        """
        del config
        return ()

    @abstractmethod
    def address(self, config: ConfigT, netloc: str, model: str) -> FrontendAddress:
        """How clients on this machine reach it. ``netloc`` is "HOST:PORT", ``model`` a model."""

    @abstractmethod
    async def open(
        self, config: ConfigT, services: ServicesT, *, local_socket: str | None = None
    ) -> OpenFrontend:
        """Listen with SO_REUSEPORT: ``config.replicas`` processes share the port.

        ``local_socket`` is the path of a Unix socket on which it answers as well, and where the
        supervisor requests /live and /ready; ``commutator.frontend.health_routes`` answers them.
        Raises ConfigError when the address or the certificate cannot be used.
        """
