"""The messages of Envoy's external processing protocol, read and written.

They are in a pool of their own: a client's library in the same process may bring others of the same
names. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

from attrs import evolve, frozen
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from commutator_endpoint_picker.order import GatewayError

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
METHOD = f"/{SERVICE}/Process"

DESTINATION = "x-gateway-destination-endpoint"
"""Header and metadata key: "IP:PORT", further ones after commas, in order of trial."""
SERVED = "x-gateway-destination-endpoint-served"
"""Metadata key: the endpoint that the gateway sent the request to."""
SUBSET = "x-gateway-destination-endpoint-subset"
"""Metadata key: the endpoints that a route allows."""
MODEL_REWRITE = "x-gateway-model-name-rewrite"
"""Header: the model that serves the request, in its worker's words."""

BODY_NONE, BODY_FULL_DUPLEX = 0, 4
"""Values of ``ProcessingMode.BodySendMode``."""
CHUNK_BYTES = 62_000
"""Envoy takes no larger pieces of a body at once."""
_OVERWRITE = 2
_LB = "envoy.lb"
_SUBSET_HINT = "envoy.lb.subset_hint"

_file_set = FileDescriptorSet.FromString(
    files("commutator_endpoint_picker").joinpath("external_processor.binpb").read_bytes()
)
_pool = DescriptorPool()
for _one in _file_set.file:
    _pool.AddSerializedFile(_one.SerializeToString())


def message(name: str) -> type[Any]:
    """The class of a message, such as "ProcessingRequest"."""
    full = f"envoy.service.ext_proc.v3.{name}"
    found: type[Any] = GetMessageClass(_pool.FindMessageTypeByName(full))
    return found


_Request = message("ProcessingRequest")
_Response = message("ProcessingResponse")


def parsed(data: bytes) -> Any:
    """A ``ProcessingRequest``. Raises GatewayError for what is none."""
    made = _Request()
    try:
        made.ParseFromString(data)
    except DecodeError as error:
        raise GatewayError(f"the message cannot be read: {error}") from None
    return made


def headers_of(found: Any) -> Iterator[tuple[str, str]]:
    """The (name in lower case, value) of an ``HttpHeaders``; what is no text is replaced."""
    for one in found.headers.headers:
        value = one.raw_value or one.value
        yield one.key.decode("ascii", "replace").lower(), value.decode("utf-8", "surrogateescape")


def subset_of(request: Any) -> frozenset[str] | None:
    """The endpoints that the route allows; None: all. Empty: none."""
    hint = request.metadata_context.filter_metadata
    if _SUBSET_HINT not in hint or SUBSET not in hint[_SUBSET_HINT].fields:
        return None
    value = hint[_SUBSET_HINT].fields[SUBSET]
    listed = [one.string_value for one in value.list_value.values] or [value.string_value]
    return frozenset(part for one in listed for part in _parts(one))


def _parts(text: str) -> Iterator[str]:
    return (part for one in text.split(",") if (part := one.strip()))


def served_by(request: Any) -> str | None:
    """The endpoint that answers, in a message with the answer's headers; None: it is not said."""
    known = request.metadata_context.filter_metadata
    if _LB not in known or SERVED not in known[_LB].fields:
        return None
    return known[_LB].fields[SERVED].string_value or None


@frozen(kw_only=True)
class Decided:
    """What the gateway is told about a request."""

    endpoints: Sequence[str]
    """"IP:PORT" in order of trial; not empty."""
    headers: Mapping[str, str]
    """To be added to the request, in lower case."""
    body: bytes
    """What the worker gets."""

    def without_body(self) -> Decided:
        """The same, once the body was sent."""
        return evolve(self, body=b"")


def picked(decided: Decided, *, had_body: bool, had_trailers: bool) -> Iterator[bytes]:
    """The answers to a whole request: where it goes, then what goes there."""
    destination = ",".join(decided.endpoints)
    response = _Response()
    common = response.request_headers.response
    common.clear_route_cache = True
    told = {**decided.headers, DESTINATION: destination}
    if had_body:  # of another length than the client's, perhaps
        told["content-length"] = str(len(decided.body))
    _set(common.header_mutation, told)
    metadata = response.dynamic_metadata.fields[_LB].struct_value
    metadata.fields[DESTINATION].string_value = destination
    yield response.SerializeToString()
    if had_body:
        yield from _body_pieces("request_body", decided.body, ends=not had_trailers)
    if had_trailers:
        yield passed_trailers("request_trailers")


def _body_pieces(kind: str, body: bytes, *, ends: bool) -> Iterator[bytes]:
    """``kind`` is "request_body" or "response_body"."""
    for begin in range(0, max(1, len(body)), CHUNK_BYTES):
        response = _Response()
        streamed = getattr(response, kind).response.body_mutation.streamed_response
        streamed.body = body[begin : begin + CHUNK_BYTES]
        streamed.end_of_stream = ends and begin + CHUNK_BYTES >= len(body)
        yield response.SerializeToString()


def passed_headers(added: Mapping[str, str]) -> bytes:
    """The answer to an answer's headers: to be passed on, with ``added``."""
    response = _Response()
    _set(response.response_headers.response.header_mutation, added)
    data: bytes = response.SerializeToString()
    return data


def passed_body(body: bytes, *, ends: bool, duplex: bool) -> Iterator[bytes]:
    """The answers to a piece of an answer: to be passed on as it is.

    ``duplex``: the gateway has given it away, and must have it back.
    """
    if not duplex:
        response = _Response()
        response.response_body.response.SetInParent()
        yield response.SerializeToString()
    else:
        yield from _body_pieces("response_body", body, ends=ends)


def passed_trailers(kind: str) -> bytes:
    """The answer to trailers; ``kind`` is "request_trailers" or "response_trailers"."""
    response = _Response()
    getattr(response, kind).SetInParent()
    data: bytes = response.SerializeToString()
    return data


def answered(status: int, body: bytes, headers: Mapping[str, str], details: str) -> bytes:
    """An answer to the client, which no worker sees. ``details`` is for the gateway's log."""
    response = _Response()
    immediate = response.immediate_response
    immediate.status.code = status
    immediate.body = body
    immediate.details = details
    _set(immediate.headers, headers)
    data: bytes = response.SerializeToString()
    return data


def _set(mutation: Any, headers: Mapping[str, str]) -> None:
    for name, value in headers.items():
        option = mutation.set_headers.add()
        option.append_action = _OVERWRITE
        option.header.key = name.lower().encode("ascii", "replace")
        option.header.raw_value = value.encode("utf-8", "surrogateescape")
