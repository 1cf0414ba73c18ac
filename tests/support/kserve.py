"""A front door with a gRPC door, and the calls of a client to it, without a client's library."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from attrs import define
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, front_door

from commutator_grpc.config import GrpcConfig
from commutator_kserve.messages import SERVICE, message
from commutator_kserve.protocol import KserveConfig
from commutator_openai.protocol import OpenAiConfig

__all__ = ["RpcDoor", "free_port", "infer_request", "rpc_door", "texts", "values_of"]

ModelInferRequest = message("ModelInferRequest")
ModelInferResponse = message("ModelInferResponse")
ModelStreamInferResponse = message("ModelStreamInferResponse")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        port: int = made.getsockname()[1]
        return port


def infer_request(
    text: str | Sequence[str] = "Hi",
    *,
    request_id: str = "",
    streaming: bool | None = None,
    model: str = MODEL,
    outputs: Sequence[str] = (),
    raw: bool = True,
    **parameters: Any,
) -> Any:
    """A ModelInferRequest about one text, or some."""
    made = ModelInferRequest(model_name=model, id=request_id)
    sent = [text] if isinstance(text, str) else list(text)
    given = made.inputs.add(name="text_input", datatype="BYTES", shape=[len(sent)])
    encoded = [one.encode() for one in sent]
    if raw:
        made.raw_input_contents.append(
            b"".join(struct.pack("<I", len(one)) + one for one in encoded)
        )
    else:
        given.contents.bytes_contents.extend(encoded)
    if streaming is not None:
        given = made.inputs.add(name="streaming", datatype="BOOL", shape=[1])
        if raw:
            made.raw_input_contents.append(bytes([streaming]))
        else:
            given.contents.bool_contents.append(streaming)
    for name in outputs:
        made.outputs.add(name=name)
    for name, value in parameters.items():
        field = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(made.parameters[name], field[type(value)], value)
    return made


def texts(raw: bytes) -> list[str]:
    """The strings of a raw tensor."""
    found, at = [], 0
    while at < len(raw):
        (size,) = struct.unpack_from("<I", raw, at)
        found.append(raw[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def values_of(response: Any) -> dict[str, Any]:
    """The outputs of a ModelInferResponse by name."""
    found: dict[str, Any] = {}
    for one, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if one.datatype == "BYTES":
            found[one.name] = texts(raw)
        else:
            kind = {"FP32": "f", "INT32": "i"}[one.datatype]
            found[one.name] = list(struct.unpack(f"<{len(raw) // 4}{kind}", raw))
    return found


def plain(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters as plain values."""
    return {
        name: getattr(one, one.WhichOneof("parameter_choice")) for name, one in parameters.items()
    }


@define
class RpcDoor:
    """A client of the gRPC door of a front door."""

    http: FrontDoor
    channel: grpc.aio.Channel
    port: int
    metadata: tuple[tuple[str, str], ...] = ()

    def unary(self, name: str) -> Any:
        """A method with one answer."""
        return self.channel.unary_unary(
            f"/{SERVICE}/{name}",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=message(f"{name}Response").FromString,
        )

    async def call(self, name: str, request: Any = None, **options: Any) -> Any:
        sent = message(f"{name}Request")() if request is None else request
        return await self.unary(name)(sent, metadata=self.metadata, **options)

    async def infer(self, *args: Any, **values: Any) -> Any:
        return await self.call("ModelInfer", infer_request(*args, **values))

    def stream(self, **options: Any) -> Any:
        """A ModelStreamInfer."""
        options.setdefault("metadata", self.metadata)
        return self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda one: (
                one if isinstance(one, bytes) else one.SerializeToString()
            ),
            response_deserializer=ModelStreamInferResponse.FromString,
        )(**options)


@asynccontextmanager
async def rpc_door(
    dispatcher: FakeDispatcher | None = None,
    *args: Any,
    metadata: Sequence[tuple[str, str]] = (),
    grpc_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[RpcDoor]:
    """An HTTP door with `openai` and `kserve`, and a gRPC door with `kserve`, on free ports."""
    port = free_port()
    protocols = (KserveConfig(kind="kserve"),)
    door = GrpcConfig(kind="grpc", port=port, protocols=protocols, **(grpc_options or {}))
    async with (
        front_door(
            dispatcher or FakeDispatcher(),
            *args,
            protocols=(OpenAiConfig(kind="openai"), *protocols),
            more_doors=(door,),
            **options,
        ) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield RpcDoor(http, channel, port, tuple(metadata))
