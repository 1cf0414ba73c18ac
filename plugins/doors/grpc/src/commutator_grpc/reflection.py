"""Server reflection: which services and messages there are, to those who may ask anything."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from google.protobuf.descriptor_pool import DescriptorPool
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha._async import ReflectionServicer

from commutator.contract.principal import Credentials
from commutator.errors import CommutatorError
from commutator.frontend import to_failure
from commutator_grpc.call import CallInfo, DoorParts, address_of, headers_of
from commutator_grpc.status import code_of, trailers_of
from commutator_http.middleware import bearer_of

_MOST_STREAMS = 64


def pool_of(descriptors: Iterable[Sequence[bytes]]) -> DescriptorPool:
    """The messages of some protocols, and those of health and reflection.

    A pool of its own: protocols' names do not meet those of other libraries in the process.
    """
    pool = DescriptorPool()
    for file in (health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR):
        pool.AddSerializedFile(file.serialized_pb)
    for files in descriptors:
        for serialized in files:
            pool.AddSerializedFile(serialized)
    return pool


class GuardedReflection(ReflectionServicer):  # type: ignore[misc]
    """Asks for a key where requests need one."""

    def __init__(self, parts: DoorParts, names: Sequence[str], pool: DescriptorPool) -> None:
        super().__init__([*names, reflection.SERVICE_NAME], pool)
        self._parts = parts
        self._open = 0

    async def ServerReflectionInfo(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[Any], unused_context: CallInfo
    ) -> AsyncIterator[Any]:
        """Answers each question of a stream."""
        await self._check(unused_context)
        self._open += 1
        try:
            async for answer in super().ServerReflectionInfo(request_iterator, unused_context):
                yield answer
        finally:
            self._open -= 1

    async def _check(self, context: CallInfo) -> None:
        if self._open >= _MOST_STREAMS:
            text = f"{_MOST_STREAMS} clients ask already"
            await context.abort(StatusCode.RESOURCE_EXHAUSTED, text)
        try:
            if self._parts.identifies:
                headers = headers_of(context)
                await self._parts.gate.principal(
                    Credentials(
                        bearer=bearer_of(headers),
                        headers=headers,
                        peer=address_of(context.peer()),
                    )
                )
        except CommutatorError as error:
            failure = to_failure(error, "")
            await context.abort(code_of(failure), failure.message, trailers_of(failure))
