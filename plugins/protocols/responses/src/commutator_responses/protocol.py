"""The protocol of kind `responses`: OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import msgspec
from attrs import frozen

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route, setting
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example
from commutator.contract.response_store import ResponseStore, ResponseStoreConfig
from commutator.contract.settings import PositiveSeconds
from commutator.errors import ConfigError
from commutator_responses.stores import MemoryConfig

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices
    from commutator_responses.background import Background


@frozen(kw_only=True)
class ResponsesConfig(ProtocolConfig):
    """OpenAI's Responses API."""

    store: ResponseStoreConfig = setting(
        "Where responses are kept, for clients that continue or read them by their ids: in the "
        "`memory` of one front door, in a file of one host (`sqlite`), where all hosts find them "
        "(`nats`), or nowhere (`none`: every request is served as with `store: false`).",
        factory=lambda: MemoryConfig(kind="memory"),
    )
    background_lease_s: PositiveSeconds = setting(
        "A response in the background has failed when the front door that makes it was not heard "
        "of for so many seconds.",
        30.0,
    )
    server_tools: Literal["leave_out", "refuse"] = setting(
        "What becomes of tools that OpenAI's own servers run, such as web search: `leave_out` "
        "answers without them and names `tools` in X-Commutator-Ignored, `refuse` answers 400.",
        "leave_out",
    )


class Responses(Protocol[ResponsesConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def mount(
        self, config: ResponsesConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        replicas = services.config.replicas
        if config.store.in_one_process and replicas > 1:
            problem = (
                f"store: kind {config.store.kind} keeps responses in one process, and replicas is "
                f"{replicas}: a client would find its responses only now and then; set replicas: "
                "1, or use store: {kind: sqlite, path: FILE}"
            )
            raise ConfigError([problem], "frontend")
        return _Mounted(config, services.response_stores[config.store.kind](config.store))

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
        self._background: Background | None = None

    def routes(self) -> Sequence[Route]:
        from commutator_responses.background import Background
        from commutator_responses.conversations import Conversations
        from commutator_responses.handlers import Handlers

        if self._background is None:
            self._background = Background(self._store, self._config.background_lease_s)
        store, conversations = self._store, Conversations(self._store)
        handlers = Handlers(store, conversations, self._background, self._config.server_tools)
        one = "/v1/responses/{id}"
        return [
            Route(method="POST", path="/v1/responses", handle=handlers.create),
            Route(method="WEBSOCKET", path="/v1/responses", handle=handlers.message),
            Route(method="POST", path="/v1/responses/compact", handle=handlers.compact),
            Route(method="POST", path="/v1/responses/input_tokens", handle=handlers.input_tokens),
            Route(method="GET", path=one, handle=handlers.retrieve),
            Route(method="DELETE", path=one, handle=handlers.delete),
            Route(method="GET", path=f"{one}/input_items", handle=handlers.input_items),
            Route(method="POST", path=f"{one}/cancel", handle=handlers.cancel),
        ]

    def failed(self, failure: Failure) -> bytes:
        from commutator_responses.writer import error_body

        return msgspec.json.encode(error_body(failure))

    def failed_message(self, failure: Failure) -> bytes:
        from commutator_responses.writer import line_error

        return line_error(failure)

    async def close(self) -> None:
        if self._background is not None:
            await self._background.close()
        if self._store is not None:
            await self._store.close()
