"""What changes a running deployment, or looks into its workers' tiers, over HTTP.

    POST /admin/workers/ID/drain       send it no new requests; it finishes those it has
    POST /admin/workers/ID/undrain     send it requests again
    POST /admin/workers/ID/role/ROLE   "prefill", "decode" or "both"
    GET  /admin/workers/ID/load        its requests, as it counts them itself
    GET  /admin/planner                what the planner wants and sees, and its last plan
    GET  /admin/planner/explain        the last plan until ?at=UNIX_SECONDS, by default the last one
    GET  /admin/planner/history        its latest changes and warnings
    GET  /admin/tiers                  blocks and bytes
    GET  /admin/tiers/statistics       counters, with reasons
    POST /admin/tiers/explain          which blocks of a prompt would be reused; a KvPrompt as JSON
    POST /admin/tiers/evict            remove blocks; of one tier with ?tier=NAME
    POST /admin/tiers/verify           read and check every block; ?tier=NAME, ?timeout_s=SECONDS

Those about tiers ask every worker, or the one of ?worker=ID, or those of ?model=NAME, and answer
{"answers": {ID: ...}, "problems": {ID: {"message": ..., "without_tiers": true | false}}}.
"""

from __future__ import annotations

import asyncio
import logging
import math
import pwd
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from typing import TypeVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from commutator.contract.operations import OPERATIONS_PREFIX
from commutator.contract.worker import KvPrompt, Role
from commutator.engine import TokenApiClient
from commutator.errors import (
    CommutatorError,
    EngineError,
    EngineWithoutTiersError,
    PermissionDeniedError,
    RequestError,
)
from commutator.frontend import FrontendServices
from commutator_http.health import json_response

log = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")
_TIMEOUT_S = 10.0
_LONGEST_S = 86_400.0
_CREDENTIALS = struct.Struct("3i")


def admin_routes(
    services: FrontendServices, administrator: Callable[[web.Request], str]
) -> Iterable[web.RouteDef]:
    """The routes for an aiohttp application.

    ``administrator`` names the sender of a request, for the log, who may do all of this; it raises
    PermissionDeniedError for all others. The application turns errors into answers.
    """
    one = _Administration(services, administrator)
    return [
        web.post("/admin/workers/{id}/drain", one.act(one.drain)),
        web.post("/admin/workers/{id}/undrain", one.act(one.undrain)),
        web.post("/admin/workers/{id}/role/{role}", one.act(one.set_role)),
        web.get("/admin/workers/{id}/load", one.question(one.load)),
        web.get("/admin/planner", one.question(one.planner)),
        web.get("/admin/planner/explain", one.question(one.planner_explain)),
        web.get("/admin/planner/history", one.question(one.planner_history)),
        web.get("/admin/tiers", one.question(one.contents)),
        web.get("/admin/tiers/statistics", one.question(one.statistics)),
        web.post("/admin/tiers/explain", one.question(one.explain)),
        web.post("/admin/tiers/evict", one.act(one.evict)),
        web.post("/admin/tiers/verify", one.act(one.verify)),
    ]


def local_user(request: web.Request) -> str | None:
    """Who sent a request over a Unix socket, as the kernel says; None over another one."""
    connection = None
    if request.transport is not None:
        connection = request.transport.get_extra_info("socket")
    if connection is None or connection.family != socket.AF_UNIX:
        return None
    sent = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(sent)
    name = ""
    with suppress(KeyError):  # a user without a name
        name = pwd.getpwuid(user).pw_name
    return f"{name or 'user'} (uid {user})"


class _Administration:
    """The handlers; each raises CommutatorError for what cannot be done."""

    def __init__(
        self, services: FrontendServices, administrator: Callable[[web.Request], str]
    ) -> None:
        self._services = services
        self._administrator = administrator

    def act(self, handler: Callable[[web.Request], Awaitable[object]]) -> Handler:
        """For what changes something: it is logged with who did it, and what came of it."""

        async def handle(request: web.Request) -> web.Response:
            try:
                who = self._administrator(request)
            except PermissionDeniedError as error:
                log.warning("refused: %s: %s", _act(request), error)
                raise
            try:
                answer = await handler(request)
            except CommutatorError as error:
                log.warning("%s: %s failed: %s", who, _act(request), error)
                raise
            log.info("%s: %s", who, _act(request))
            return json_response(answer)

        return handle

    def question(self, handler: Callable[[web.Request], Awaitable[object]]) -> Handler:
        """For what changes nothing."""

        async def handle(request: web.Request) -> web.Response:
            self._administrator(request)
            return json_response(await handler(request))

        return handle

    async def drain(self, request: web.Request) -> object:
        return await self._set_draining(request, True)

    async def undrain(self, request: web.Request) -> object:
        return await self._set_draining(request, False)

    async def set_role(self, request: web.Request) -> object:
        worker_id, asked = request.match_info["id"], request.match_info["role"]
        if asked not in set(Role):
            names = ", ".join(Role)
            raise RequestError(f"role: expected one of {names}, got {asked[:80]!r}", "role")
        registry = self._services.registry
        return _found(worker_id, registry and await registry.set_role(worker_id, Role(asked)))

    async def load(self, request: web.Request) -> object:
        (address,) = self._addresses(request.match_info["id"]).values()
        return await _with_client(address, lambda client: client.load())

    async def planner(self, request: web.Request) -> object:
        return await self._ask_planner("status")

    async def planner_explain(self, request: web.Request) -> object:
        text = request.query.get("at")
        try:
            at = None if text is None else float(text)
        except ValueError as error:
            raise RequestError(
                f"at: expected seconds since 1970, got {text!r:.80}", "at"
            ) from error
        return await self._ask_planner("explain", at)

    async def planner_history(self, request: web.Request) -> object:
        return await self._ask_planner("history")

    async def _ask_planner(self, question: str, argument: float | None = None) -> object:
        link = self._services.planner
        if link is None:
            raise RequestError("this deployment has no planner: its file has no section `planner`")
        return await link.ask(question, argument)

    async def contents(self, request: web.Request) -> object:
        return await self._ask(request, lambda client: client.kv_contents(timeout_s=_TIMEOUT_S))

    async def statistics(self, request: web.Request) -> object:
        return await self._ask(request, lambda client: client.kv_statistics(timeout_s=_TIMEOUT_S))

    async def explain(self, request: web.Request) -> object:
        try:
            prompt = msgspec.json.decode(await request.read(), type=KvPrompt)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"body: {error}") from error
        return await self._ask(
            request, lambda client: client.kv_explain(prompt, timeout_s=_TIMEOUT_S)
        )

    async def evict(self, request: web.Request) -> object:
        tier = request.query.get("tier")
        return await self._ask(request, lambda client: client.kv_evict(tier, timeout_s=_TIMEOUT_S))

    async def verify(self, request: web.Request) -> object:
        tier, timeout_s = request.query.get("tier"), _timeout_s(request)
        return await self._ask(request, lambda client: client.kv_verify(tier, timeout_s=timeout_s))

    async def _set_draining(self, request: web.Request, draining: bool) -> object:
        worker_id, registry = request.match_info["id"], self._services.registry
        return _found(worker_id, registry and await registry.set_draining(worker_id, draining))

    async def _ask(
        self, request: web.Request, question: Callable[[TokenApiClient], Awaitable[object]]
    ) -> object:
        """The answers by worker, and what stood against those of the other workers."""
        addresses = self._addresses(request.query.get("worker"), request.query.get("model"))

        async def ask(address: str) -> object:
            try:
                return await _with_client(address, question)
            except EngineError as error:
                return error

        found = await asyncio.gather(*map(ask, addresses.values()))
        told = dict(zip(addresses, found, strict=True))
        return {
            "answers": {
                worker: answer
                for worker, answer in told.items()
                if not isinstance(answer, EngineError)
            },
            "problems": {
                worker: {
                    "message": str(error),
                    "without_tiers": isinstance(error, EngineWithoutTiersError),
                }
                for worker, error in told.items()
                if isinstance(error, EngineError)
            },
        }

    def _addresses(self, worker_id: str | None, model: str | None = None) -> Mapping[str, str]:
        """Where workers answer questions about themselves, by worker; None asks for all.

        Raises RequestError when there is none.
        """
        known = [
            one
            for one in self._services.dispatcher.status()
            if worker_id in (None, one.worker_id) and model in (None, one.model)
        ]
        if not known:
            raise _unknown(worker_id) if worker_id is not None else RequestError("no worker is up")
        found = {one.worker_id: one.admin_address for one in known if one.admin_address is not None}
        if not found:
            names = ", ".join(one.worker_id for one in known)
            raise RequestError(f"the engine of {names} answers no questions about itself")
        return found


async def _with_client(
    address: str, question: Callable[[TokenApiClient], Awaitable[AnswerT]]
) -> AnswerT:
    client = TokenApiClient(address)
    try:
        return await question(client)
    finally:
        await client.close()


def _found(worker_id: str, found: object) -> object:
    if not found:
        raise _unknown(worker_id)
    return {}


def _unknown(worker_id: str) -> RequestError:
    return RequestError(f"there is no worker {worker_id[:80]!r}", "worker", "worker_not_found")


def _timeout_s(request: web.Request) -> float:
    text = request.query.get("timeout_s", str(_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= _LONGEST_S:
        raise RequestError(
            f"timeout_s: expected more than 0 and at most {_LONGEST_S:g}, got {text[:80]!r}",
            "timeout_s",
        )
    return value


def _act(request: web.Request) -> str:
    """The act for the log; values from clients are quoted by their encoding."""
    return str(request.rel_url)[:256].removeprefix(OPERATIONS_PREFIX)
