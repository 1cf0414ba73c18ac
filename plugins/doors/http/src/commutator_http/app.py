"""What a door serves: the routes of its protocols and of operators, and CORS."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from attrs import evolve

from commutator.contract.answer import Failure
from commutator.contract.operations import (
    OPERATOR,
    Operations,
    OperationsDoor,
    OperationsNeed,
    OperationsRoute,
)
from commutator.contract.principal import Authenticator, Credentials, Principal
from commutator.contract.protocol import RPC_METHODS, MountedProtocol, Route
from commutator.errors import ConfigError
from commutator.frontend import FrontendServices
from commutator_http.administration import admin_routes
from commutator_http.call import CALL, DOOR, WEBSOCKET, DoorParts, HttpCall, MountedRoute
from commutator_http.config import HttpConfig
from commutator_http.cors import Cors
from commutator_http.health import OPERATIONS_PATHS, health_routes
from commutator_http.middleware import (
    add_headers,
    administrator,
    authenticate,
    authenticate_administrator,
    exchange,
    failure_response,
    live_reader,
    own_user,
)
from commutator_http.sockets import close_sockets, serve_socket

_HTTP = {WEBSOCKET: "GET"}
"""The methods that requests have, where those of routes are others."""


def build_app(
    config: HttpConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol] = (),
    local_socket: str | None = None,
) -> web.Application:
    """The application of a door; ``commutator_http.server`` runs it.

    Raises ConfigError when there is no model, an API key cannot be read, or two protocols or
    operations claim a route.
    """
    if not services.models:
        raise ConfigError(["models: there is nothing to serve; add a model"])
    gate = services.gate
    if config.api_keys:
        keys = StaticKeys([secret.reveal() for secret in config.api_keys])
        gate = gate.after("api_keys", keys)
    guarded = config.operations != "open"
    middlewares: list[Middleware] = []
    cors = Cors(config.cors_origins) if config.cors_origins else None
    if cors is not None:
        middlewares.append(cors.preflight)
    if not gate.is_open:
        middlewares.append(authenticate if guarded else authenticate_administrator)
    identifies = guarded and not gate.is_open
    parts = DoorParts(config, services, gate, protocols, identifies=identifies, cors=cors)
    checks = {} if config.operations == "off" else _CHECKS
    return _app(parts, protocols, local_socket, checks, middlewares, needs_key=not gate.is_open)


def build_local_app(
    config: HttpConfig,
    services: FrontendServices,
    protocols: Sequence[MountedProtocol],
    local_socket: str,
) -> web.Application:
    """Everything, without a key, for the Unix socket that only the run's own user reaches."""
    parts = DoorParts(config, services, services.gate, protocols, is_local=True)
    return _app(parts, protocols, local_socket, {"act": own_user, "watch": own_user})


_Check = Callable[[web.Request], str]


def _app(
    parts: DoorParts,
    protocols: Sequence[MountedProtocol],
    local_socket: str | None,
    checks: Mapping[OperationsNeed, _Check],
    middlewares: Sequence[Middleware] = (),
    *,
    needs_key: bool = False,
) -> web.Application:
    """An application of the protocols and probes, and of operations whose needs are in ``checks``.

    Raises ConfigError.
    """
    app = web.Application(
        middlewares=[exchange, *middlewares], client_max_size=parts.max_body_bytes
    )
    app.on_response_prepare.append(add_headers)
    app.on_shutdown.append(close_sockets)
    app[DOOR] = parts
    app.add_routes(_protocol_routes(parts, protocols))
    routes = health_routes(
        parts.services, local_socket, probes_only=not checks, is_local=parts.is_local
    )
    app.add_routes(routes)
    if checks:
        app.add_routes(admin_routes(parts.services, checks["act"]))
        door = OperationsDoor(serves_clients=bool(protocols), needs_key=needs_key)
        _add_operations(app, door, checks)
    if ("GET", "/") not in _taken(app):
        app.add_routes([web.get("/", _root)])
    return app


_NO_CONSOLE = (
    "the deployment's page is not served: pip install commutator-console, and leave the section "
    "`operations` out or name `console` in it"
)
_ABSENT = dict.fromkeys(("/ui", "/admin/live"), _NO_CONSOLE)
"""What is said at a path that one of our packages has, where it is not served."""

_CHECKS: Mapping[OperationsNeed, _Check] = {
    "act": administrator,
    "watch": live_reader,
    "nothing": lambda _: "",
}
"""Of the callers of operations, by what a route needs: who they are, or PermissionDeniedError."""


def _add_operations(
    app: web.Application, door: OperationsDoor, checks: Mapping[OperationsNeed, _Check]
) -> None:
    """The routes of operations whose needs are in ``checks``. Raises ConfigError."""
    parts = app[DOOR]
    found = _operations_routes(parts.services.operations, door, _taken(app))
    for route in found:
        if (check := checks.get(route.needs)) is None:
            continue
        is_file = route.needs == "nothing"
        if is_file:
            parts.files.add(route.path)
        handler = _checked(check, route.handle)
        # A client that asks for the headers alone would wait for the end of a stream.
        if route.method == "GET":
            app.add_routes([web.get(route.path, handler, allow_head=is_file)])
        else:
            app.add_routes([web.post(route.path, handler)])
    for path in _ABSENT.keys() - {route.path for route in found}:
        app.add_routes([web.get(path, _absent(_ABSENT[path]))])
        parts.files.add(path)


def _taken(app: web.Application) -> set[tuple[str, str]]:
    """The methods and paths that are answered so far."""
    return {(route.method, route.get_info().get("path", "")) for route in app.router.routes()}


async def _root(_: web.Request) -> web.Response:
    """Clients ask whether anybody is there, Claude Code by HEAD."""
    return web.Response(text="Commutator\n")


def _operations_routes(
    operations: Iterable[Operations], door: OperationsDoor, taken: Iterable[tuple[str, str]] = ()
) -> list[OperationsRoute]:
    """What all of them answer on ``door``; ``taken`` are methods and paths that are core's.

    Raises ConfigError when two answer the same, or one what core does.
    """
    owners: dict[tuple[str, str], Operations | None] = dict.fromkeys(taken)
    made = []
    for one in operations:
        for route in one.routes(door):
            other = owners.setdefault((route.method, route.path), one)
            if other is not one:
                first = "commutator itself" if other is None else type(other).__module__
                problem = f"operations: {route.method} {route.path} is claimed by {first} and by "
                raise ConfigError([f"{problem}{type(one).__module__}; leave one of the two out"])
            made.append(route)
    return made


def _checked(check: _Check, handle: Handler) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        OPERATOR.set(check(request))
        return await handle(request)

    return handler


def _absent(text: str) -> Handler:
    async def handler(_: web.Request) -> web.StreamResponse:
        raise web.HTTPNotFound(text=text)

    return handler


_DEFAULT = Principal(name="default", permissions=frozenset({"admin"}))
"""The principal of every such key. It has no salt of its own: its clients' salts are all there is,
as without keys."""


class StaticKeys(Authenticator):
    """Compares a bearer token with a few keys, which may be short and in any alphabet."""

    def __init__(self, keys: Sequence[str]) -> None:
        """``keys``: at least one."""
        self._accepted = [key.encode() for key in keys]

    async def authenticate(self, credentials: Credentials) -> Principal | None:
        if credentials.bearer is None:
            return None
        given = credentials.bearer.encode(errors="surrogateescape")
        # Compare every key, each in constant time, so that timing reveals nothing.
        matches = [hmac.compare_digest(given, key) for key in self._accepted]
        return _DEFAULT if any(matches) else None


def _protocol_routes(parts: DoorParts, protocols: Sequence[MountedProtocol]) -> list[web.RouteDef]:
    """One route for each method and path, which protocols may share. Raises ConfigError."""
    claims = sorted(
        (
            ((route.method, route.path), number, route, protocol)
            for number, protocol in enumerate(protocols)
            for route in protocol.routes()
            if route.method not in RPC_METHODS
        ),
        key=itemgetter(0, 1),
    )
    made = []
    for (method, path), group in groupby(claims, key=itemgetter(0)):
        routes = [(route, protocol) for _, _, route, protocol in group]
        found = _shared(method, path, routes)
        if method == WEBSOCKET:
            found = evolve(found, answer=partial(serve_socket, found.answer))
        if "{" not in path and path not in parts.files | OPERATIONS_PATHS:
            for written in (path, path + "/"):  # as people and clients write it
                parts.routes[_HTTP.get(method, method), written] = found
        handler = _handler(found)
        parts.protocols[handler] = found.protocol
        options = {"expect_handler": _expect} if method == "POST" else {}
        made.append(web.route(_HTTP.get(method, method), path, handler, **options))
    # A path with a pattern must not hide another one that stands for itself.
    return sorted(made, key=lambda route: ("{" in route.path, route.path))


def _shared(
    method: str, path: str, routes: Sequence[tuple[Route, MountedProtocol]]
) -> MountedRoute:
    """A path that one protocol has, or several that tell their callers apart."""
    routes = [one for one in routes if not one[0].yields] or routes
    others = [(route, protocol) for route, protocol in routes if route.is_mine is None]
    if len(others) > 1:
        names = " and ".join(sorted({type(protocol).__module__ for _, protocol in others}))
        problem = f"protocols: {method} {path} is claimed by {names}, which do not tell their "
        problem += "callers apart; give each a door of its own"
        raise ConfigError([problem], "frontend")
    if len(routes) == 1 and others:
        route, protocol = routes[0]
        return MountedRoute(path, route.handle, protocol)
    told = [(route, protocol) for route, protocol in routes if route.is_mine is not None]

    async def answer(call: HttpCall) -> None:
        mine = (one for one in told if one[0].is_mine is not None and one[0].is_mine(call.headers))
        found = next(mine, others[0] if others else None)
        if found is None:
            raise web.HTTPNotFound
        route, call.protocol = found
        await route.handle(call)

    return MountedRoute(path, answer, (others or routes)[0][1])


def _handler(route: MountedRoute) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        call = request[CALL]
        await route.answer(call)
        return call.answered

    return handle


async def _expect(request: web.Request) -> web.Response | None:
    """Answer an ``Expect`` header: continue, or an error."""
    expected = request.headers.get("Expect", "")
    if expected.lower() != "100-continue":
        status = web.HTTPExpectationFailed.status_code
        text = f"expected Expect: 100-continue or none, got {expected[:100]}"
        parts = request.app[DOOR]  # there is no call yet
        protocol = parts.protocols.get(request.match_info.handler, parts.default)
        return failure_response(Failure(status, text, "expectation_failed"), protocol)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun
    return None
