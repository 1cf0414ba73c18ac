"""The protocol of kind `openai`: chat, completions, embeddings, models, engines' own answers."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import msgspec
from attrs import Attribute, frozen

import commutator
from commutator import MountedProtocol, Protocol, ProtocolConfig, Route, setting
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example

if TYPE_CHECKING:
    from commutator.frontend import Call, FrontendServices


_EMBEDDINGS = "/v1/embeddings"
_HOST = re.compile(r"[a-z0-9_.-]+|[0-9a-f:.]+")
_DOCUMENTS = 16
"""Principals with the same models share one description of the API."""


def _are_hosts(_: object, _field: Attribute[Any], value: tuple[str, ...]) -> None:
    for host in value:
        if not _HOST.fullmatch(host):
            raise ValueError(
                f'"{host}" is no host name or address in lower case; write it without scheme, port '
                "and path, such as images.example"
            )


@frozen(kw_only=True)
class OpenAiConfig(ProtocolConfig):
    """OpenAI's API."""

    media_hosts: tuple[str, ...] = setting(
        "Hosts, in lower case, from which engines may fetch what requests name by URL: pictures, "
        "sounds, files. By default none, as engines fetch from inside the deployment's network; "
        "data: URLs are always served.",
        (),
        validator=_are_hosts,
    )
    strict: bool = setting(
        "Answer 400 to parameters that are unknown or have no effect here, such as `store`, "
        "`metadata` and `reasoning_effort`, instead of ignoring them and naming them in "
        "X-Commutator-Ignored.",
        False,
    )


class OpenAi(Protocol[OpenAiConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def mount(
        self, config: OpenAiConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        return _Mounted(config, services, door)

    def example(self, url: str, model: str) -> Example:
        question = {"role": "user", "content": "What is the capital of France?"}
        return Example(
            api_url=f"{url}/v1",
            path="/v1/chat/completions",
            body={"model": model, "messages": [question], "temperature": 0, "max_tokens": 64},
        )


class _Mounted(MountedProtocol):
    session_headers = ("x-session-id", "x-session-affinity")

    def __init__(self, config: OpenAiConfig, services: FrontendServices, door: DoorFacts) -> None:
        self._config = config
        self._services = services

        @lru_cache(maxsize=_DOCUMENTS)
        def document(*models: str) -> bytes:
            from commutator_openai.openapi import openapi_document

            return msgspec.json.encode(
                openapi_document(
                    commutator.__version__,
                    models,
                    needs_key=door.needs_key,
                    operations=door.operations,
                )
            )

        self._document = document

    def routes(self) -> Sequence[Route]:
        return [*self._routes()]

    def _routes(self) -> Iterable[Route]:
        from commutator_openai import models
        from commutator_openai.chat import Generations
        from commutator_openai.embeddings import Embeddings
        from commutator_openai.pass_through import ENDPOINTS, PassThrough

        passing = PassThrough(frozenset(self._config.media_hosts))
        generations = Generations(self._config.strict, passing)
        posts: dict[str, Callable[[Call], Awaitable[None]]] = {
            "/v1/chat/completions": generations.chat_completions,
            "/v1/chat/completions/batch": generations.batch,
            "/v1/completions": generations.completions,
            "/invocations": generations.invocations,
            **dict.fromkeys(ENDPOINTS, passing.engine_only),
            _EMBEDDINGS: Embeddings(self._config.strict, passing).embeddings,
            "/tokenize": partial(models.tokenize, strict=self._config.strict),
            "/detokenize": partial(models.detokenize, strict=self._config.strict),
        }
        gets: dict[str, Callable[[Call], Awaitable[None]]] = {
            "/v1/models": models.list_models,
            "/v1/models/{id:.+}": models.retrieve_model,
            "/tokenizer_info": models.tokenizer_info,
            "/version": models.version,
            "/load": models.load,
            "/openapi.json": self._openapi,
        }
        for method, handlers in (("POST", posts), ("GET", gets)):
            for path, handle in handlers.items():
                handed_on = path in ENDPOINTS and path != _EMBEDDINGS
                yield Route(method=method, path=path, handle=handle, yields=handed_on)

    async def _openapi(self, call: Call) -> None:
        await call.reply([self._document(*self._services.names_for(call.principal))])

    def failed(self, failure: Failure) -> bytes:
        from commutator_openai.responses import error_body

        return error_body(failure)
