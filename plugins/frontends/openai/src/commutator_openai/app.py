"""The routes of the front door, and CORS."""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

import commutator
from commutator.errors import ConfigError
from commutator.frontend import (
    FrontendServices,
    LiveFeed,
    admin_routes,
    health_routes,
    live_routes,
)
from commutator_openai import generate, models, ui
from commutator_openai.api_keys import StaticKeys
from commutator_openai.body import BODY_LIMITS, BodyLimits, expect
from commutator_openai.config import OpenAiConfig
from commutator_openai.middleware import (
    EXCHANGE,
    FORWARD_HEADERS,
    SERVICES,
    STRANGERS,
    add_headers,
    administrator,
    authenticate,
    authenticate_administrator,
    exchange,
    live_reader,
    own_user,
)
from commutator_openai.pass_through import ENDPOINTS, MEDIA_HOSTS, engine_only
from commutator_openai.protocol.openapi import openapi_document
from commutator_openai.protocol.rate_limits import RATE_LIMIT_HEADERS
from commutator_openai.strangers import Strangers

__all__ = [
    "Cors",
    "build_app",
    "build_local_app",
    "build_operations_app",
]


def build_app(
    config: OpenAiConfig,
    services: FrontendServices,
    local_socket: str | None = None,
    feed: LiveFeed | None = None,
) -> web.Application:
    """The application; ``commutator_openai.server`` runs it.

    All applications of a process share ``feed``. Raises ConfigError when there is no model or when
    an API key cannot be read.
    """
    if not services.models:
        raise ConfigError(["models: there is nothing to serve; add a model"])
    keys = [secret.reveal() for secret in config.api_keys]
    middlewares: list[Middleware] = [exchange]
    app = web.Application(client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(add_headers)
    if config.cors_origins:
        cors = Cors(config.cors_origins)
        middlewares.append(cors.preflight)
        app.on_response_prepare.append(cors.add_headers)
    if keys:
        services.gate.ask_first("api_keys", StaticKeys(keys))
    if not services.gate.is_open:
        middlewares.append(authenticate)
    app.middlewares.extend(middlewares)
    _configure(app, config, services)
    needs_key = not services.gate.is_open

    @lru_cache(maxsize=_DOCUMENTS)
    def document(*models: str) -> bytes:
        found = openapi_document(
            commutator.__version__,
            models,
            needs_key=needs_key,
            operations=config.admin is None,
        )
        return msgspec.json.encode(found)

    async def openapi(request: web.Request) -> web.Response:
        models = services.models_for(request[EXCHANGE].principal)
        return web.Response(body=document(*models), content_type="application/json")

    app.add_routes(
        [
            *_api_routes(),
            web.get("/openapi.json", openapi),
            *health_routes(services, local_socket, probes_only=config.admin is not None),
        ]
    )
    if config.admin is None:
        app.add_routes(admin_routes(services, administrator))
        app.add_routes(live_routes(feed or LiveFeed(services, local_socket), live_reader))
        app.add_routes(ui.routes(chat=True, needs_key=needs_key))
    return app


def build_local_app(
    config: OpenAiConfig, services: FrontendServices, local_socket: str, feed: LiveFeed
) -> web.Application:
    """Everything, without a key, for the Unix socket that only the run's own user reaches."""
    app = _operations(services, local_socket)
    _configure(app, config, services)
    app.add_routes([*_api_routes(), *admin_routes(services, own_user)])
    app.add_routes(live_routes(feed, own_user))
    return app


def _configure(app: web.Application, config: OpenAiConfig, services: FrontendServices) -> None:
    app[FORWARD_HEADERS] = config.forward_headers
    app[SERVICES] = services
    app[STRANGERS] = Strangers()
    app[generate.STRICT] = config.strict
    app[MEDIA_HOSTS] = frozenset(config.media_hosts)
    app[BODY_LIMITS] = BodyLimits(max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)


def _api_routes() -> list[web.RouteDef]:
    return [
        web.post("/v1/chat/completions", generate.chat_completions, expect_handler=expect),
        web.post("/v1/completions", generate.completions, expect_handler=expect),
        *(web.post(path, engine_only, expect_handler=expect) for path in ENDPOINTS),
        web.get("/v1/models", models.list_models),
        web.get("/v1/models/{id:.+}", models.retrieve_model),
        web.post("/tokenize", models.tokenize, expect_handler=expect),
        web.post("/detokenize", models.detokenize, expect_handler=expect),
    ]


def build_operations_app(
    services: FrontendServices, local_socket: str | None, feed: LiveFeed
) -> web.Application:
    """/live, /ready, /health, /metrics and /ui for an address that only operators reach.

    What changes the deployment needs a key here, too, and so does the live view.
    """
    app = _operations(services, local_socket)
    app.middlewares.append(authenticate_administrator)
    app.add_routes(admin_routes(services, administrator))
    app.add_routes(live_routes(feed, live_reader))
    app.add_routes(ui.routes(chat=False, needs_key=not services.gate.is_open))
    return app


def _operations(services: FrontendServices, local_socket: str | None) -> web.Application:
    app = web.Application(middlewares=[exchange])
    app.on_response_prepare.append(add_headers)
    app[SERVICES] = services
    app[STRANGERS] = Strangers()
    app.add_routes(health_routes(services, local_socket))
    return app


_DOCUMENTS = 16
"""Principals with the same models share one description of the API."""


_SHOWN = (
    "X-Request-Id",
    "X-Commutator-Worker",
    "X-Commutator-Decision",
    generate.IGNORED_HEADER,
    "Retry-After",
)
_EXPOSED = ", ".join(_SHOWN + RATE_LIMIT_HEADERS)
_METHODS = "GET, POST, OPTIONS"
_PREFLIGHT_AGE_S = 600


class Cors:
    """``origins`` are complete, such as https://chat.example; ``*`` allows every one."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    @web.middleware
    async def preflight(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer the preflight request of a browser; it carries no key."""
        asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not (asked and self._allowed(request)):
            return await handler(request)
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": _METHODS,
                "Access-Control-Allow-Headers": request.headers.get(
                    "Access-Control-Request-Headers", "*"
                ),
                "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
            },
        )

    async def add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the browser show this response to the page."""
        response.headers["Vary"] = "Origin"
        if origin := self._allowed(request):
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED

    def _allowed(self, request: web.Request) -> str | None:
        origin = request.headers.get("Origin")
        if origin is None:
            return None
        if "*" in self._origins:
            return "*"
        return origin if origin in self._origins else None
