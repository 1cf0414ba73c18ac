"""The part of the rollout in each front door: it serves by what should run, and asks for people.

POST /admin/rollout/apply    a configuration, as `commutator apply` sends it
POST /admin/rollout/diff     the same, to see what it would change
POST /admin/rollout/pause, /resume, /undo
GET  /admin/rollout          the present generation, and every worker's state
GET  /admin/rollout/history  the last generations, newest first
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from attrs import evolve

from commutator.config.load import Loaded, build_config, read_files
from commutator.contract.operations import (
    OPERATOR,
    Operations,
    OperationsContext,
    OperationsDoor,
    OperationsRoute,
)
from commutator.errors import CommutatorError, ConfigError, RegistryError, RequestError
from commutator.frames import FrameProtocol, Questions, kind_of
from commutator.frontend import FrontendServices
from commutator.frontend.process import parsers_of, text_models, traffic_of
from commutator.registry.client import connect
from commutator.registry.hub import connections
from commutator_rollout.observed import Counter
from commutator_rollout.plugin import PATH, SERVICE

log = logging.getLogger(__name__)

_ANSWER_S = 900.0
"""For an answer of the supervisor, which may have to download a model first."""
_MEETS_S = 30.0
"""For a connection to workers that the registry has as ready."""
_CONNECTS_S = 5.0
_LOOK_S = 0.05
_TELL_S = 1.0
"""Between two messages of what has ended with versions that are compared."""


async def use(services: FrontendServices, file: Path) -> None:
    """Serve requests that come from now on by the configuration in ``file``.

    What cannot be changed in a running process stays as it is. Raises CommutatorError, or what a
    policy raises that is made with it; then nothing has changed.
    """
    old = services.loaded
    assert old is not None
    new = await asyncio.to_thread(_read, file, old)
    before, after = old.config, new.config
    if before == after:
        return
    known = {model.name: model for model in before.models}
    changed = [model for model in after.models if known.get(model.name) != model]
    texts = await asyncio.to_thread(text_models, changed)
    traffic = traffic_of(new)
    parsers = parsers_of(changed, texts, old.host)
    if before.auth != after.auth and before.auth and after.auth:
        kinds = old.host.authenticators.kinds
        await services.gate.use([(one.kind, kinds[one.kind].thing(one)) for one in after.auth])
    sizes = {name: services.dispatcher.hashed_block_size(name) for name in services.models}
    await services.dispatcher.use(after)
    services.config = evolve(after.frontend, doors=services.config.doors)
    services.limiter.resize(
        after.frontend.max_concurrent_requests, after.frontend.max_queued_requests
    )
    names = [model.name for model in after.models]
    all_texts = {**services.models, **texts}
    services.models = {name: all_texts[name] for name in names}
    services.traffic = traffic
    services.parsers = _with(services.parsers, [model.name for model in changed], parsers)
    hashed = services.dispatcher.hashed_block_size
    fresh = {
        name: services.preprocessor(name)
        for name in names
        if name in texts or sizes.get(name) != hashed(name)
    }
    services.preprocessors = {**services.preprocessors, **fresh}
    for name in names:
        if name not in known:
            services.metrics.model_served(name)
    logging.getLogger().setLevel(after.log.level.upper())
    services.loaded = new
    if gone := known.keys() - set(names):
        # Requests that have found the model already go on, for as long as any may take.
        asyncio.get_running_loop().call_later(
            before.frontend.request_timeout_s, partial(_begin_forgetting, services, gone)
        )


def _read(file: Path, old: Loaded) -> Loaded:
    problems: list[str] = []
    tree = read_files([file], problems)
    return build_config(tree, old.host, [file], problems, only_routes=True)


def _with(known: Mapping[str, Any], names: list[str], made: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: one for name, one in known.items() if name not in names}
    return {**kept, **made}


_forgetting: set[asyncio.Task[None]] = set()


def _begin_forgetting(services: FrontendServices, names: set[str]) -> None:
    task = asyncio.get_running_loop().create_task(_forget(services, names))
    _forgetting.add(task)
    task.add_done_callback(_forgetting.discard)


async def _forget(services: FrontendServices, names: set[str]) -> None:
    gone = names - services.models.keys()
    services.parsers = _with(services.parsers, sorted(gone), {})
    services.preprocessors = _with(services.preprocessors, sorted(gone), {})
    for name in gone:
        await services.dispatcher.forget(name)


class _Link:
    """The way to the part beside the supervisor of this host."""

    def __init__(self, services: FrontendServices, name: str, file: Path) -> None:
        self._services = services
        self._name = name
        self._file = file
        self._connection: FrameProtocol | None = None
        self._connected = asyncio.Event()
        self._questions = Questions()
        self._told: asyncio.Queue[tuple[int, list[Any]]] = asyncio.Queue()
        self._watching: asyncio.Task[None] | None = None
        """Counts for the judge, while there is something to judge."""

    async def run(self) -> None:
        """Stay connected, until cancelled."""
        using = asyncio.create_task(self._use())
        found = connections(self._connect, self._on_frame, "what should run cannot be asked for")
        try:
            async with aclosing(found):
                async for connection, lost in found:
                    self._connection = connection
                    self._connected.set()
                    connection.send([SERVICE, "door", self._name])
                    await lost.wait()
                    self._connection = None
                    self._connected.clear()
                    self._watch([])
                    self._questions.fail(CommutatorError("the supervisor went away; try again"))
        finally:
            using.cancel()
            self._watch([])

    async def _connect(
        self, on_frame: Callable[[list[Any]], None], on_lost: Callable[[], None]
    ) -> FrameProtocol:
        address = self._services.registry_address
        if address is None:
            raise RegistryError("this front door has no supervisor")
        return await connect(address, on_frame, on_lost)

    async def _use(self) -> None:
        while True:
            number, workers = await self._told.get()
            problem = None
            try:
                await use(self._services, self._file)
                await self._meet(workers)
            except CommutatorError as error:
                problem = str(error)
            except Exception as error:
                log.exception("a configuration cannot be used; all stays as it is")
                problem = f"{type(error).__name__}: {error}"
            if self._connection is not None:
                self._connection.send([SERVICE, "used", number, problem])

    async def _meet(self, workers: Iterable[Any]) -> None:
        """Wait until this front door can route to these workers, but not for ever."""
        missing = set(workers)
        with suppress(TimeoutError):
            async with asyncio.timeout(_MEETS_S):
                while missing:
                    for known in self._services.dispatcher.statuses():
                        missing -= {one.worker_id for one in known if one.state == "ready"}
                    if missing:
                        await asyncio.sleep(_LOOK_S)

    def _watch(self, models: list[str]) -> None:
        """Tell what becomes of requests for these models from now on, and of no others."""
        if self._watching is not None:
            self._watching.cancel()
        self._watching = asyncio.create_task(self._count(models)) if models else None

    async def _count(self, models: list[str]) -> None:
        counter = Counter(frozenset(models))
        forget = self._services.dispatcher.observe(counter)
        try:
            while True:
                await asyncio.sleep(_TELL_S)
                if (seen := counter.take()) and self._connection is not None:
                    self._connection.send([SERVICE, "seen", seen])
        finally:
            forget()

    def _on_frame(self, frame: list[Any]) -> None:
        match frame:
            case [_, "watch", list(models)]:
                self._watch([str(one) for one in models])
            case [_, "use", int(number), list(workers)]:
                self._told.put_nowait((number, workers))
            case [_, "answer", int(number), value]:
                self._questions.answer(number, value)
            case [_, "refused", int(number), list(problems), str(where)]:
                lines = [str(one) for one in problems]
                refusal = ConfigError(lines, where) if where else CommutatorError("; ".join(lines))
                self._questions.answer(number, refusal)
            case _:
                log.warning("the supervisor sent an unknown frame %s", kind_of(frame))

    async def ask(self, question: str, argument: Any) -> Any:
        """The supervisor's answer. Raises RequestError with its problems."""
        try:  # a front door that has just started, or whose supervisor begins anew
            async with asyncio.timeout(_CONNECTS_S):
                await self._connected.wait()
        except TimeoutError:
            raise CommutatorError("the supervisor cannot be reached; try again soon") from None
        if (connection := self._connection) is None:
            raise CommutatorError("the supervisor went away; try again")
        try:
            return await self._questions.ask(
                lambda number: connection.send([SERVICE, "ask", number, question, argument]),
                _ANSWER_S,
            )
        except TimeoutError as error:
            raise CommutatorError(f"no answer within {_ANSWER_S:g} s") from error
        except (ConfigError, CommutatorError) as error:
            raise RequestError(str(error), code="refused") from error


class RolloutAtDoor(Operations):
    """What operators see and do about what should run."""

    def __init__(self, context: OperationsContext) -> None:
        services: FrontendServices = context.services
        self._services = services
        self._link: _Link | None = None
        if context.local_socket is not None and services.loaded is not None:
            socket = Path(context.local_socket)
            self._link = _Link(services, socket.stem, socket.with_name("config.json"))
            self._running = asyncio.get_running_loop().create_task(self._link.run())

    def routes(self, door: OperationsDoor) -> Iterator[OperationsRoute]:
        del door

        def act(name: str) -> OperationsRoute:
            return OperationsRoute(
                method="POST",
                path=f"{PATH}/{name}",
                needs="act",
                handle=partial(self._act, name),
            )

        yield from map(act, ("apply", "diff", "pause", "resume", "undo"))
        for path, question in ((PATH, "status"), (f"{PATH}/history", "history")):
            yield OperationsRoute(
                method="GET", path=path, needs="watch", handle=partial(self._look, question)
            )

    async def _look(self, question: str, _: web.Request) -> web.Response:
        return web.json_response(await self._ask(question, None))

    async def _act(self, name: str, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read() or b"{}")
        except (ValueError, RecursionError) as error:
            raise RequestError(f"body: not JSON: {error}") from error
        if not isinstance(body, dict):
            raise RequestError("body: expected a JSON object")
        asked = {**body, "who": OPERATOR.get()}
        if name == "diff":
            name, asked = "apply", asked | {"dry_run": True}
        answer = await self._ask(name, asked)
        if isinstance(answer, dict) and "workers" in answer and "changes" in answer:
            self._add_cost(answer)
        if not asked.get("dry_run"):
            log.info("%s: rollout %s", asked["who"], name)
        return web.json_response(answer)

    def _add_cost(self, report: dict[str, Any]) -> None:
        """The KV blocks of workers that leave, as far as this front door knows."""
        cached = self._services.dispatcher.cached_blocks()
        for row in report["workers"]:
            row["kv_blocks_lost"] = sum(cached.get(one, 0) for one in row["leaving"])

    def _ask(self, question: str, argument: Any) -> Awaitable[Any]:
        if self._link is None:
            raise CommutatorError("this front door has no supervisor that could change anything")
        return self._link.ask(question, argument)
