"""The protocol's messages as classes, from ``inference.proto``.

They are in a pool of their own: a client's library in the same process may bring others of the same
names.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from commutator.errors import RequestError

SERVICE = "inference.GRPCInferenceService"
_MAX_FIELDS = 4_096
"""Of a message itself, not of those in it: two bytes would make an empty tensor of sixty."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_SIZES = {_FIXED64: 8, _FIXED32: 4}

_file_set = FileDescriptorSet.FromString(
    files("commutator_kserve").joinpath("inference.binpb").read_bytes()
)
DESCRIPTORS = tuple(one.SerializeToString() for one in _file_set.file)
_pool = DescriptorPool()
for _one in DESCRIPTORS:
    _pool.AddSerializedFile(_one)


def message(name: str) -> type[Any]:
    """The class of a message of the package, such as "ModelInferRequest"."""
    found: type[Any] = GetMessageClass(_pool.FindMessageTypeByName(f"inference.{name}"))
    return found


def parsed(cls: type[Any], data: bytes) -> Any:
    """``data`` as ``cls``. Raises RequestError for what is none, or has too many parts."""
    _check(data)
    made = cls()
    try:
        made.ParseFromString(data)
    except DecodeError as error:
        raise RequestError(f"the message cannot be read: {error}", code="invalid_body") from None
    return made


def as_json(one: Message) -> dict[str, Any]:
    """The message as REST has it: names as they are written, 64-bit numbers as strings."""
    found: dict[str, Any] = MessageToDict(
        one, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _check(data: bytes) -> None:
    """Count the fields of a message before anything is made of them. Raises RequestError."""
    at, end, fields = 0, len(data), 0
    while at < end:
        fields += 1
        if fields > _MAX_FIELDS:
            raise RequestError(
                f"the message is too complex: expected at most {_MAX_FIELDS} fields",
                code="too_complex",
            )
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
            at += size
        elif kind in _SIZES:
            at += _SIZES[kind]
        else:
            return  # no such field: parsing says so


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number and where it ends; what is cut off ends with the data."""
    value = shift = 0
    while at < len(data) and shift < 70:  # noqa: PLR2004 - ten bytes at most
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:  # noqa: PLR2004 - the last byte
            return value, at
    return value, len(data)
