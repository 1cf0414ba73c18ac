"""Failures, which are told in HTTP's terms, as gRPC's status with its details."""

from __future__ import annotations

import math

from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from commutator.contract.answer import Failure

_CODES = {
    400: StatusCode.INVALID_ARGUMENT,
    401: StatusCode.UNAUTHENTICATED,
    402: StatusCode.RESOURCE_EXHAUSTED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    501: StatusCode.UNIMPLEMENTED,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}
_INTERNAL = 500
_MAX_CHARACTERS = 1_000
"""Of what trailers say: clients refuse long ones."""


def code_of(failure: Failure) -> StatusCode:
    """GRPC's word for it."""
    status = failure.status
    usual = StatusCode.INVALID_ARGUMENT if status < _INTERNAL else StatusCode.INTERNAL
    return _CODES.get(status, usual)


def trailers_of(failure: Failure) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata that ends a call: when to come again, and what was wrong, for programs.

    Details are ``google.rpc.RetryInfo``, ``ErrorInfo`` and ``BadRequest``.
    """
    retry_s = failure.headers.get("Retry-After")
    details = []
    if failure.code is not None:
        details.append(_packed(ErrorInfo(reason=failure.code.upper(), domain="commutator")))
    if failure.param is not None:
        field = failure.param[:_MAX_CHARACTERS]
        wrong = BadRequest.FieldViolation(
            field=field, description=failure.message[:_MAX_CHARACTERS]
        )
        details.append(_packed(BadRequest(field_violations=[wrong])))
    trailers: list[tuple[str, str | bytes]] = []
    for name, value in failure.headers.items():
        trailers.append((name.lower(), value))
    if retry_s is not None:
        info = RetryInfo()
        info.retry_delay.FromSeconds(math.ceil(float(retry_s)))
        details.append(_packed(info))
    if details:
        status = Status(
            code=code_of(failure).value[0],
            message=failure.message[:_MAX_CHARACTERS],
            details=details,
        )
        trailers.append(("grpc-status-details-bin", status.SerializeToString()))
    return tuple(trailers)


def _packed(message: ErrorInfo | BadRequest | RetryInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed
