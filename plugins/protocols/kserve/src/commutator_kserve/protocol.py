"""The protocol of kind `kserve`: inference by tensors, over gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attrs import frozen

from commutator import MountedProtocol, Protocol, ProtocolConfig, Route
from commutator.contract.answer import Failure
from commutator.contract.protocol import DoorFacts, Example

if TYPE_CHECKING:
    from commutator.frontend import FrontendServices


@frozen(kw_only=True)
class KserveConfig(ProtocolConfig):
    """KServe's v2 protocol, with the extensions of Triton."""


class Kserve(Protocol[KserveConfig, "FrontendServices"]):
    """Imports what answers only where it is mounted."""

    def mount(
        self, config: KserveConfig, services: FrontendServices, door: DoorFacts
    ) -> MountedProtocol:
        del config, services, door
        return _Mounted()

    def example(self, url: str, model: str) -> Example:
        question = "The capital of France is"
        tensor = {
            "name": "text_input",
            "datatype": "BYTES",
            "shape": [1],
            "contents": {"bytes_contents": ["VGhlIGNhcGl0YWwgb2YgRnJhbmNlIGlz"]},
        }
        limits = {"max_tokens": {"int64_param": 16}}
        asked = {"model_name": model, "inputs": [tensor], "parameters": limits}
        return Example(
            api_url=url,
            path=f"/v2/models/{model}/generate",
            body={"text_input": question, "max_tokens": 16, "temperature": 0},
            rpc=("inference.GRPCInferenceService/ModelInfer", asked),
        )


class _Mounted(MountedProtocol):
    def __init__(self) -> None:
        from commutator_kserve.messages import DESCRIPTORS

        self.descriptors = DESCRIPTORS

    def routes(self) -> Sequence[Route]:
        from commutator_kserve.rest import rest_routes
        from commutator_kserve.rpc import rpc_routes

        return [*rest_routes(), *rpc_routes()]

    def failed(self, failure: Failure) -> bytes:
        from commutator_kserve.writers import error_body

        return error_body(failure)

    def failed_message(self, failure: Failure) -> bytes:
        from commutator_kserve.inference import Inference
        from commutator_kserve.writers import StreamForm

        return StreamForm(Inference(model=""), "").failed(failure)
