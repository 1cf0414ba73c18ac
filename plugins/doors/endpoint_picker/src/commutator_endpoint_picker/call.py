"""One request of a gateway's client: what a protocol reads of it, and how it is answered here."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, cast

from commutator.contract.protocol import MountedProtocol, Route
from commutator.frontend import FrontendServices, Gate
from commutator_endpoint_picker.config import EndpointPickerConfig
from commutator_endpoint_picker.picking import Endpoints, Pick, PickingDispatcher
from commutator_grpc.call import identify
from commutator_http.byte_budget import ByteBudget
from commutator_http.call import MessageCall, request_id_of, room_for

_BODIES = 8
"""Bodies of the largest size that are read and parsed at the same time; others wait."""
_MAX_WAITING = 256
_JSON = "application/json; charset=utf-8"
_QUIET_METHODS = frozenset({"GET", "HEAD"})


class PickerParts:
    """What the requests of one door share."""

    def __init__(
        self,
        config: EndpointPickerConfig,
        services: FrontendServices,
        gate: Gate,
        protocols: Sequence[MountedProtocol],
    ) -> None:
        self.config = config
        self.services = services
        self.gate = gate
        self.identifies = not gate.is_open
        self.endpoints = Endpoints(config.endpoints)
        self.bodies = ByteBudget(_BODIES * config.max_body_bytes, _MAX_WAITING)
        self.forward_headers = tuple(services.config.forward_headers)
        self.default = protocols[0]
        """In whose shape errors are said where no route is found."""
        self._routes: dict[tuple[str, str], list[tuple[Route, MountedProtocol]]] = {}
        for protocol in protocols:
            for route in protocol.routes():
                if "{" not in route.path:
                    key = route.method, route.path
                    self._routes.setdefault(key, []).append((route, protocol))

    def route(
        self, method: str, path: str, headers: Mapping[str, str]
    ) -> tuple[Route, MountedProtocol] | None:
        """What answers a request; None: it is of no protocol here."""
        found = self._routes.get((method, path), [])
        named = [one for one in found if one[0].is_mine is not None and one[0].is_mine(headers)]
        others = [one for one in found if one[0].is_mine is None]
        return min([*named, *others], key=lambda one: one[0].yields, default=None)


class _Uncounted:
    """The metrics as a handler has them, who cannot know the tokens of an answer."""

    def __init__(self, metrics: Any) -> None:
        self._metrics = metrics

    def __getattr__(self, name: str) -> Any:
        return getattr(self._metrics, name)

    def tokens_used(self, *_: Any) -> None:
        """The door counts them when the answer has ended."""


class PickCall(MessageCall):
    """A request, whose answer a worker gives by the gateway, unless it is answered here."""

    def __init__(
        self,
        parts: PickerParts,
        method: str,
        path: str,
        headers: Mapping[str, str],
        subset: frozenset[str] | None,
    ) -> None:
        self.whole_path = path
        bare = path.partition("?")[0]
        found = parts.route(method, bare, headers)
        endpoint = "other" if found is None else found[0].path
        services = copy.copy(parts.services)
        super().__init__(services, request_id_of(headers), endpoint, method, bare, headers)
        self.route = None if found is None else found[0]
        self.protocol = parts.default if found is None else found[1]
        self.parts_of_door = parts
        self.picked: asyncio.Future[Pick] = asyncio.get_running_loop().create_future()
        """Set when it is known who serves it."""
        self.whole: list[bytes] = []
        """The answer of one that is answered here."""
        self.content_type = _JSON
        dispatcher = PickingDispatcher(
            parts.services.dispatcher, self, parts.endpoints, subset, self.picked
        )
        services.dispatcher = cast("Any", dispatcher)
        services.metrics = cast("Any", _Uncounted(parts.services.metrics))

    @property
    def peer(self) -> str | None:
        """As the gateway says; it is the client of the connection."""
        return None

    @property
    def forwarded(self) -> Sequence[str]:
        return self.parts_of_door.forward_headers

    @property
    def is_quiet(self) -> bool:
        """Whether it is worth a line only if it failed."""
        return self.method in _QUIET_METHODS

    def room_for_body(self, *types: str) -> AbstractAsyncContextManager[None]:
        del types  # browsers reach the gateway, which has its own rules for them
        return room_for(self, self.parts_of_door.bodies, 0)  # it is here, and held already

    async def write(self, data: bytes) -> None:
        if not self.picked.done():
            self.whole.append(data)

    async def reply(self, parts: list[bytes], content_type: str = _JSON) -> None:
        self.content_type = content_type
        await super().reply(parts, content_type)

    async def identify(self) -> None:
        """Find the principal, and begin to count the request. Raises AuthenticationError."""
        await identify(self, self.parts_of_door.gate, counts=not self.is_quiet)
