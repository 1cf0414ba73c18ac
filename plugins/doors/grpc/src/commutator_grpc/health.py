"""grpc.health.v1: whether the process serves, for everyone, as HTTP's /ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from commutator.frontend import FrontendServices
from commutator_grpc.call import CallInfo

_LOOK_S = 1.0
_MOST_WATCHES = 64

_Answer = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers for the server as a whole (the empty name) and for each of ``names``.

    Those of ``alive`` serve as soon as they answer.
    """

    def __init__(
        self, services: FrontendServices, names: Collection[str], alive: Collection[str] = ()
    ) -> None:
        self._services = services
        self._alive = frozenset(alive)
        self._names = {"", *names, *alive}
        self._watches = 0

    def _status(self, name: str) -> int:
        serves = name in self._alive or self._services.is_ready()
        return int(_Answer.SERVING if serves else _Answer.NOT_SERVING)

    async def Check(self, request: Any, context: CallInfo) -> Any:  # noqa: N802 - gRPC's name
        """The present state."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _Answer(status=self._status(request.service))

    async def Watch(  # noqa: N802 - gRPC's name
        self, request: Any, context: CallInfo
    ) -> AsyncIterator[Any]:
        """The present state, and each later one."""
        if self._watches >= _MOST_WATCHES:
            text = f"{_MOST_WATCHES} clients watch already; use Check"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._watches += 1
        try:
            known, last = request.service in self._names, -1
            while True:
                status = self._status(request.service) if known else int(_Answer.SERVICE_UNKNOWN)
                if status != last:
                    yield _Answer(status=status)
                last = status
                await asyncio.sleep(_LOOK_S)
        finally:
            self._watches -= 1
