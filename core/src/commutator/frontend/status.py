"""The handlers that tell about the front door itself."""

from __future__ import annotations

import attrs
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from commutator.errors import RoutingError
from commutator.frontend.errors import error_response, to_http_error
from commutator.frontend.responses import ModelCard, ModelList
from commutator.frontend.services import SERVICES, Services
from commutator.frontend.siblings import OWN

__all__ = ["health", "list_models", "live", "metrics", "ready", "retrieve_model"]


async def live(_: web.Request) -> web.Response:
    """GET /live: the process answers."""
    return _json({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: every model has a worker, and the process does not end."""
    services = request.app[SERVICES]
    if services.draining:
        problem = "this front door is shutting down"
    elif not services.dispatcher.ready():
        problem = "not every model has a ready worker; GET /health tells more"
    else:
        return _json({"status": "ok"})
    # Answered here rather than raised: probes ask all the time, and a raised error is logged.
    return error_response(to_http_error(RoutingError(problem), ""))


async def health(request: web.Request) -> web.Response:
    """GET /health: models, workers and load; always 200, for people and dashboards."""
    services = request.app[SERVICES]
    queue = services.limiter.queue
    status = "ready" if services.dispatcher.ready() else "degraded"
    return _json(
        {
            "status": "draining" if services.draining else status,
            "models": list(services.models),
            "workers": [attrs.asdict(worker) for worker in services.dispatcher.status()],
            "requests": {"running": queue.running, "queued": queue.waiting},
            "waiting_for_a_worker": {
                name: services.dispatcher.waiting(name) for name in services.models
            },
            "prefill_queues": {
                name: attrs.asdict(queue)
                for name, queue in services.dispatcher.prefill_queues().items()
            },
            "refused_handovers": [str(pair) for pair in services.dispatcher.refused_handovers()],
            "load_peers": services.dispatcher.load_peers(),
            "indexed_blocks": services.dispatcher.indexed_blocks(),
            "registry": services.registry_address,
            "warnings": [attrs.asdict(warning) for warning in services.dispatcher.warnings()],
        }
    )


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format: of all front doors, as nobody can choose one."""
    services = request.app[SERVICES]
    page = services.metrics.render()
    if services.siblings is not None and OWN not in request.query:
        page = (await services.siblings.metrics(page.decode())).encode()
    return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    services = request.app[SERVICES]
    return _json(ModelList("list", tuple(_card(services, name) for name in services.models)))


async def retrieve_model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}."""
    services = request.app[SERVICES]
    name, _ = services.text_model(request.match_info["id"])
    return _json(_card(services, name))


def _card(services: Services, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=services.started_unix_s,
        owned_by="commutator",
        max_model_len=services.max_model_len(name),
    )


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
