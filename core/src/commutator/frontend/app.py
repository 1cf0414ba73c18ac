"""Puts the front door together: routes, middlewares and what they share."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from aiohttp import web
from aiohttp.typedefs import Middleware

import commutator
from commutator.config.model import FrontendConfig
from commutator.errors import ConfigError
from commutator.frontend import generate, status, tokenize
from commutator.frontend.body import expect
from commutator.frontend.cors import Cors
from commutator.frontend.middleware import add_headers, exchange, require_key
from commutator.frontend.openapi import openapi_document
from commutator.frontend.pass_through import ENDPOINTS, engine_only
from commutator.frontend.services import SERVICES, RequestDispatcher, Services
from commutator.text.model import TextModel

__all__ = ["build_app"]


def build_app(
    config: FrontendConfig, models: Mapping[str, TextModel], dispatcher: RequestDispatcher
) -> web.Application:
    """The application; run it with ``handler_cancellation``, as ``frontend.server`` does.

    ``models`` maps the names that clients give. Raises ConfigError when there is none or when an
    API key cannot be read.
    """
    if not models:
        raise ConfigError(["models: there is nothing to serve"])
    keys = [secret.reveal() for secret in config.api_keys]
    middlewares: list[Middleware] = [exchange]
    app = web.Application(client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(add_headers)
    if config.cors_origins:
        cors = Cors(config.cors_origins)
        middlewares.append(cors.preflight)
        app.on_response_prepare.append(cors.add_headers)
    if keys:
        middlewares.append(require_key(keys))
    app.middlewares.extend(middlewares)
    app[SERVICES] = Services(config, models, dispatcher)
    document = msgspec.json.encode(
        openapi_document(commutator.__version__, list(models), needs_key=bool(keys))
    )

    async def openapi(_: web.Request) -> web.Response:
        return web.Response(body=document, content_type="application/json")

    app.add_routes(
        [
            web.post("/v1/chat/completions", generate.chat_completions, expect_handler=expect),
            web.post("/v1/completions", generate.completions, expect_handler=expect),
            *(web.post(path, engine_only, expect_handler=expect) for path in ENDPOINTS),
            web.get("/v1/models", status.list_models),
            web.get("/v1/models/{id:.+}", status.retrieve_model),
            web.post("/tokenize", tokenize.tokenize, expect_handler=expect),
            web.post("/detokenize", tokenize.detokenize, expect_handler=expect),
            web.get("/health", status.health),
            web.get("/live", status.live),
            web.get("/ready", status.ready),
            web.get("/metrics", status.metrics),
            web.get("/openapi.json", openapi),
        ]
    )
    return app
