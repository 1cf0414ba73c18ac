"""The protocol of kind `pooling`: what of a model that generates nothing is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route, setting
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices


@frozen(kw_only=True)
class PoolingConfig(ProtocolConfig):
    """Rerank, score, classify and pool."""

    strict: bool = setting(
        "Answer 400 to parameters that are unknown or have no effect here, instead of ignoring "
        "them and naming them in X-Commutator-Ignored.",
        False,
    )


class PoolingProtocol(Protocol[PoolingConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def mount(
        self, config: PoolingConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        return _Mounted(config)

    def example(self, url: str, model: str) -> Example:
        documents = ["Paris is the capital of France.", "Bread is baked in an oven."]
        return Example(
            api_url=url,
            path="/v2/rerank",
            body={"model": model, "query": "the capital of France", "documents": documents},
        )


class _Mounted(MountedProtocol):
    def __init__(self, config: PoolingConfig) -> None:
        self._config = config

    def routes(self) -> Sequence[Route]:
        from commutator_pooling.endpoints import Endpoints

        endpoints = Endpoints(self._config.strict)
        handlers = {
            "/rerank": endpoints.rerank,
            "/v1/rerank": endpoints.rerank,
            "/v2/rerank": endpoints.rerank_v2,
            "/score": endpoints.score,
            "/v1/score": endpoints.score,
            "/classify": endpoints.classify,
            "/pooling": endpoints.pooling,
            "/v2/embed": endpoints.embed_v2,
        }
        return [Route(method="POST", path=path, handle=handle) for path, handle in handlers.items()]

    def failed(self, failure: Failure) -> bytes:
        from commutator_openai.responses import error_body

        return error_body(failure)
