"""The protocol of kind `responses`: OpenAI's Responses API."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from attrs import frozen

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route, setting
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example
from commutator.contract.settings import PositiveSeconds, Size
from commutator.errors import ConfigError

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices
    from commutator_responses.store import ResponseStore

__all__ = ["Responses", "ResponsesConfig", "StoreConfig"]


@frozen(kw_only=True)
class StoreConfig:
    """Where responses are kept, for clients that continue or read them by their ids."""

    kind: Literal["memory", "sqlite", "none"] = setting(
        "`memory` keeps them in the front door's process, until it ends; it needs `replicas: 1`. "
        "`sqlite` keeps them in the file `path`, which all front doors of one host share. With "
        "several hosts, both need a balancer that sends a client always to the same one. `none` "
        "keeps nothing: every request is served as with `store: false`.",
        "memory",
    )
    path: str | None = setting(
        "The file of `sqlite`, on a disk of this machine. It holds what clients said, unencrypted: "
        "only its own user can read it.",
        None,
    )
    max_bytes: Size = setting(
        "The most that all responses together take. When it is full, the principal that holds the "
        "most loses those that it used least recently.",
        256 << 20,
    )
    ttl_s: PositiveSeconds = setting(
        "Seconds after which a response is forgotten that was neither read nor continued.",
        86_400.0,
    )


@frozen(kw_only=True)
class ResponsesConfig(ProtocolConfig):
    """OpenAI's Responses API."""

    store: StoreConfig = setting("Where responses are kept.", factory=StoreConfig)
    server_tools: Literal["leave_out", "refuse"] = setting(
        "What becomes of tools that OpenAI's own servers run, such as web search: `leave_out` "
        "answers without them and names `tools` in X-Commutator-Ignored, `refuse` answers 400.",
        "leave_out",
    )


class Responses(Protocol[ResponsesConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def problems(self, config: ResponsesConfig) -> Iterable[str]:
        store = config.store
        if (store.path is None) == (store.kind == "sqlite"):
            yield (
                "store.path: required with kind sqlite; name a file"
                if store.path is None
                else f"store.path: kind {store.kind} has no file; leave it out"
            )

    def mount(
        self, config: ResponsesConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        replicas = services.config.replicas
        if config.store.kind == "memory" and replicas > 1:
            problem = (
                f"store: kind memory keeps responses in one process, and replicas is {replicas}: a "
                "client would find its responses only now and then; set replicas: 1, or use store: "
                "{kind: sqlite, path: FILE}"
            )
            raise ConfigError([problem], "frontend")
        return _Mounted(config, _store(config.store))

    def example(self, url: str, model: str) -> Example:
        return Example(
            api_url=f"{url}/v1",
            path="/v1/responses",
            body={
                "model": model,
                "input": "What is the capital of France?",
                "max_output_tokens": 64,
            },
        )


class _Mounted(MountedProtocol):
    session_headers = ("session-id", "thread-id", "x-session-id")  # Codex's, and what others send

    def __init__(self, config: ResponsesConfig, store: ResponseStore | None) -> None:
        self._config = config
        self._store = store

    def routes(self) -> Sequence[Route]:
        from commutator_responses.handlers import Handlers

        handlers = Handlers(self._store, self._config.server_tools)
        one = "/v1/responses/{id}"
        return [
            Route(method="POST", path="/v1/responses", handle=handlers.create),
            Route(method="POST", path="/v1/responses/input_tokens", handle=handlers.input_tokens),
            Route(method="GET", path=one, handle=handlers.retrieve),
            Route(method="DELETE", path=one, handle=handlers.delete),
            Route(method="GET", path=f"{one}/input_items", handle=handlers.input_items),
            Route(method="POST", path=f"{one}/cancel", handle=handlers.cancel),
        ]

    def failed(self, failure: Failure) -> bytes:
        from commutator_responses.writer import error_body

        return msgspec.json.encode(error_body(failure))


def _store(options: StoreConfig) -> ResponseStore | None:
    """Raises ConfigError when the file cannot be used."""
    from commutator_responses.store import MemoryStore

    if options.kind == "none":
        return None
    if options.path is None:
        return MemoryStore(options.max_bytes, options.ttl_s)
    from commutator_responses.sqlite import SqliteStore

    try:
        return SqliteStore(Path(options.path), options.max_bytes, options.ttl_s)
    except (OSError, sqlite3.Error) as error:
        problem = f"store.path: {options.path} cannot be used: {error}; name another file"
        raise ConfigError([problem], "frontend") from error
