"""How a response is written to a stream: a subject, a header that says what it is, its bytes. Pure.

The subject is made of owner and id, so that nobody finds what is another's, whatever they send.
Header and bytes stand apart: who counts what is kept reads headers alone.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence

import msgspec

from commutator.contract.response_store import StoredResponse

HEADER = "Commutator-Response"
"""The header; a message without it says that there is no such response any more."""


class Record(msgspec.Struct, array_like=True, frozen=True):
    """What the header says."""

    owner: str
    id: str
    previous: str | None
    session: str | None
    maker: str | None
    until_unix_s: float
    used_s: float
    """When it was last used, to a hundredth of its lifetime."""
    input_bytes: int
    size_bytes: int
    parts_of: str | None
    """Where its bytes are, if not in the same message; ..."""
    parts: int
    """... and in how many pieces."""

    @property
    def headers(self) -> dict[str, str]:
        """As a message has it; headers are ASCII."""
        return {HEADER: base64.b64encode(msgspec.msgpack.encode(self)).decode()}

    @classmethod
    def read(cls, headers: Mapping[str, str] | None) -> Record | None:
        """None: there is no such response any more. Raises ValueError for what is none of ours."""
        if headers is None or HEADER not in headers:
            return None
        return msgspec.msgpack.decode(base64.b64decode(headers[HEADER]), type=cls)


def name_of(owner: str, response_id: str) -> str:
    """A token of a subject."""
    said = msgspec.msgpack.encode((owner, response_id))
    return hashlib.sha256(said).hexdigest()[:40]


def record_of(stored: StoredResponse, used_s: float, parts_of: str | None, parts: int) -> Record:
    """Of a response whose bytes are in ``parts`` pieces."""
    return Record(
        owner=stored.owner,
        id=stored.id,
        previous=stored.previous,
        session=stored.session,
        maker=stored.maker,
        until_unix_s=stored.until_unix_s,
        used_s=used_s,
        input_bytes=len(stored.input),
        size_bytes=stored.size_bytes,
        parts_of=parts_of,
        parts=parts,
    )


def body_of(stored: StoredResponse) -> bytes:
    """The bytes of a response."""
    return stored.input + stored.response


def split(body: bytes, most_bytes: int) -> Sequence[bytes]:
    """``body`` in pieces."""
    return [body[start : start + most_bytes] for start in range(0, len(body), most_bytes)]


def stored_of(record: Record, body: bytes) -> StoredResponse:
    """The response. Raises ValueError if bytes are missing."""
    if len(body) != record.size_bytes:
        raise ValueError(f"{record.id} has {len(body)} bytes, not {record.size_bytes}")
    return StoredResponse(
        id=record.id,
        owner=record.owner,
        previous=record.previous,
        session=record.session,
        input=body[: record.input_bytes],
        response=body[record.input_bytes :],
        maker=record.maker,
        until_unix_s=record.until_unix_s,
    )
