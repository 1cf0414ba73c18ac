"""/live, /ready, /health and /metrics of a front-door process, whatever protocol it speaks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import attrs
import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler
from attrs import AttrsInstance

from commutator.frontend import FrontendServices, installed_versions

PROBE_PATHS = frozenset({"/live", "/ready", "/healthz", "/ping"})
"""They tell everyone only whether the process answers, and whether it can serve."""

OPERATIONS_PATHS = frozenset({"/health", "/metrics"})
"""They tell about models, workers, load and principals: for those who may know."""

_OWN = "own"
"""In the query of `/metrics`: only of the process that answers."""
_SIBLING_TIMEOUT_S = 2.0
_RETRY_AFTER_S = 1
_LABEL = "frontend"
_HELP = "# HELP "


async def _page_of_all(own_socket: Path, own_page: str) -> str:
    """The metrics of the front-door processes that share a port; one that hangs is left out.

    Each answers on its own Unix socket; all sockets are in one folder.
    """
    pages = {own_socket.stem: own_page}

    async def fetch(path: Path) -> None:
        timeout = aiohttp.ClientTimeout(total=_SIBLING_TIMEOUT_S)
        connector = aiohttp.UnixConnector(str(path))
        with suppress(aiohttp.ClientError, OSError):  # TimeoutError is an OSError
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(f"http://localhost/metrics?{_OWN}=1") as answer,
            ):
                if answer.ok:
                    pages[path.stem] = await answer.text()

    siblings = set(own_socket.parent.glob(f"*{own_socket.suffix}")) - {own_socket}
    await asyncio.gather(*map(fetch, siblings))
    return merged_pages(dict(sorted(pages.items())))


def health_routes(
    services: FrontendServices,
    local_socket: str | None = None,
    *,
    probes_only: bool = False,
    is_local: bool = False,
) -> Iterable[web.RouteDef]:
    """The routes of ``PROBE_PATHS`` and ``OPERATIONS_PATHS`` for an aiohttp application.

    The application itself lets only those to ``OPERATIONS_PATHS`` who have the right;
    ``probes_only`` leaves them out; ``is_local`` adds what only the supervisor does.
    ``local_socket`` is the Unix socket on which this process answers beside its shared port; with
    several front doors, /metrics asks the others on theirs.
    """
    shared = services.config.replicas > 1

    async def live(_: web.Request) -> web.Response:
        """The process answers."""
        return json_response({"status": "ok"})

    async def ready(request: web.Request) -> web.Response:
        """Every model has a worker, and the process is not about to end."""
        # The supervisor asks, too, by the Unix socket, where clients have no address.
        if not services.is_ready(probed=bool(request.remote)):
            return _unready()
        return json_response({"status": "ok"})

    async def leave(_: web.Request) -> web.Response:
        """Answer `/ready` with 503 from now on; 204 says that nobody asks it."""
        return web.Response(status=200 if services.leave() else 204)

    async def health(_: web.Request) -> web.Response:
        """Models, workers and load; always 200, for people and dashboards."""
        return json_response(await _health(services, local_socket))

    async def metrics(request: web.Request) -> web.Response:
        """Prometheus' text format for all front doors, as a client cannot choose one."""
        page = services.metrics.render()
        if local_socket is not None and shared and _OWN not in request.query:
            page = (await _page_of_all(Path(local_socket), page.decode())).encode()
        return web.Response(body=page, headers={"Content-Type": services.metrics.content_type})

    handlers: dict[str, Handler] = {"/live": live, "/ready": ready}
    handlers |= {"/healthz": live, "/ping": live}  # as others call it
    if not probes_only:
        handlers |= {"/health": health, "/metrics": metrics}
    routes = [web.get(path, handler) for path, handler in handlers.items()]
    return [*routes, web.post("/leave", leave)] if is_local else routes


async def _health(services: FrontendServices, local_socket: str | None) -> dict[str, object]:
    dispatcher, limiter = services.dispatcher, services.limiter
    found = list(services.problems())
    status = "degraded" if found or not dispatcher.ready() else "ready"
    return {
        "status": "draining" if services.leaving or services.draining else status,
        "problems": found,
        "versions": installed_versions(),
        "models": list(services.models),
        "workers": await _in_slices(dispatcher.statuses()),
        "unready_workers": [msgspec.to_builtins(one) for one in services.unready_workers()],
        "requests": {"running": limiter.running, "queued": limiter.waiting},
        "waiting_for_a_worker": {name: dispatcher.waiting(name) for name in services.models},
        "prefill_queues": {
            name: attrs.asdict(state) for name, state in dispatcher.prefill_queues().items()
        },
        "refused_handovers": [str(pair) for pair in dispatcher.membership.refused_handovers()],
        "load_peers": dispatcher.load.peers,
        "indexed_blocks": dispatcher.indexed_blocks(),
        "registry": services.registry_address,
        "registry_age_s": _registry_age_s(services),
        "socket": local_socket,
        "warnings": await _in_slices(dispatcher.reviewing()),
    }


def _registry_age_s(services: FrontendServices) -> float | None:
    """None also before the first view, as JSON has no infinity."""
    age_s = None if services.registry is None else services.registry.view_age_s()
    return None if age_s == math.inf else age_s


async def _in_slices(slices: Iterable[Sequence[AttrsInstance]]) -> list[msgspec.Raw]:
    """Everything in ``slices`` as JSON; requests are served after each slice."""
    found: list[msgspec.Raw] = []
    for values in slices:
        found += [msgspec.Raw(msgspec.json.encode(value)) for value in values]
        await asyncio.sleep(0)
    return found


def _unready() -> web.Response:
    # Answered, not raised: probes ask all the time, and a raised error is logged.
    message = "this front door cannot serve every model now; GET /health says why"
    error = {"message": message, "type": "server_error", "param": None, "code": "no_worker"}
    return web.Response(
        status=web.HTTPServiceUnavailable.status_code,
        body=msgspec.json.encode({"error": error}),
        content_type="application/json",
        headers={"Retry-After": str(_RETRY_AFTER_S)},
    )


def json_response(value: object) -> web.Response:
    """``value``, which may hold attrs classes."""
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def merged_pages(pages: Mapping[str, str]) -> str:
    """One page with every sample of ``pages``, by front door; a label names the front door.

    Samples of one metric stand together under one header, as the format requires.
    """
    headers: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for name, page in pages.items():
        label = f'{_LABEL}="{name}"'
        metric = ""
        for line in filter(None, page.split("\n")):  # values may hold other ends of lines
            if line.startswith(_HELP):
                metric = line.removeprefix(_HELP).split(" ", 1)[0]
            if not line.startswith("#"):
                samples.setdefault(metric, []).append(_labelled(line, label))
            elif line not in (header := headers.setdefault(metric, [])):
                header.append(line)
    lines = (
        line for metric, header in headers.items() for line in (*header, *samples.get(metric, ()))
    )
    return "".join(f"{line}\n" for line in lines)


def _labelled(sample: str, label: str) -> str:
    """``name{a="b"} 1`` or ``name 1`` with one label more."""
    name, brace, rest = sample.partition("{")
    if brace and " " not in name:
        return f"{name}{{{label},{rest}"
    name, _, value = sample.partition(" ")
    return f"{name}{{{label}}} {value}"
