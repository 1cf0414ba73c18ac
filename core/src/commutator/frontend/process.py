"""The front-door process: ``python -m commutator.frontend.process CONFIG SOCKET``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeVar

from commutator import tracing
from commutator.auth.gate import Gate
from commutator.auth.unlimited import Unlimited
from commutator.config.load import Loaded, load_config
from commutator.config.model import Config
from commutator.contract.door import OpenDoor
from commutator.contract.engine import ModelConfig
from commutator.contract.limiter import LimiterContext, RequestLimiter
from commutator.contract.operations import Operations, OperationsConfig, OperationsContext
from commutator.contract.parser import Parser, ParserConfig, ParserModel
from commutator.contract.protocol import DoorFacts, MountedProtocol
from commutator.contract.registry import Change, WorkerDown
from commutator.contract.request import RequestSummary
from commutator.contract.traffic import Traffic
from commutator.errors import CommutatorError, RegistryError
from commutator.frontend.demand import DemandCounter, PlannerLink
from commutator.frontend.index_exchange import IndexExchangeClient, warmed
from commutator.frontend.limits import ConcurrencyLimiter
from commutator.frontend.loop_watch import watch_loop
from commutator.frontend.services import FrontendServices
from commutator.launcher.child import (
    calm_garbage_collector,
    raise_descriptor_limit,
    run_with_fast_loop,
    use_huge_pages,
)
from commutator.plugins import PluginHost
from commutator.registry.claims import workers_only
from commutator.registry.client import RegistryClient
from commutator.registry.hub import Hub, hub_of
from commutator.routing.dispatcher import Dispatcher
from commutator.routing.load import InFlightLoad
from commutator.routing.membership import WorkerFollower
from commutator.routing.placement import Placement
from commutator.routing.prefix_index.snapshot import INDEX_SUFFIX, IndexSharing
from commutator.routing.replica_sync import ReplicaSync
from commutator.tokenizer.defaults import configured
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import TextModel
from commutator.trust import network_of_this_process

log = logging.getLogger("commutator.frontend.process")  # not "__main__"

REGISTRY = "COMMUTATOR_REGISTRY"
"""The environment variable with the registry's "HOST:PORT"."""

_OPERATIONS = ("console", "rollout")
"""Kinds that are served where they are installed and `operations` is left out."""
_SUPERVISOR_EVERY_S = 1.0
_LAST_SETTLES = 4
"""A client that is connected may be slow to send its request, and others need not wait for it."""
_REGISTRY_PATIENCE_S = 5.0

T = TypeVar("T")


async def serve(loaded: Loaded, registry_address: str, socket_path: str) -> None:
    """Serve until SIGTERM, then finish the running requests.

    ``socket_path`` is the Unix socket on which this process alone answers.
    """
    config = loaded.config
    limiter = ConcurrencyLimiter(
        config.frontend.max_concurrent_requests, config.frontend.max_queued_requests
    )
    door, hub = _place(config, socket_path, registry_address)
    counter, load = _demand_counter(config, loaded.host)
    dispatcher = Dispatcher(
        config,
        loaded.host,
        load=load,
        on_waiting=limiter.stepped,
        on_placed=None if counter is None else partial(_count_placed, counter),
    )
    link = None if counter is None else PlannerLink(door, counter, dispatcher)
    authenticators = loaded.host.authenticators.kinds
    gate = Gate([(one.kind, authenticators[one.kind].thing(one)) for one in config.auth])
    registry = RegistryClient(registry_address)
    counting = _limiter(loaded, door, hub)
    models = text_models(config.models)
    services = FrontendServices(
        config=config.frontend,
        models=models,
        parsers=parsers_of(config.models, models, loaded.host),
        dispatcher=dispatcher,
        limiter=limiter,
        gate=gate,
        request_limiter=counting,
        traffic=traffic_of(loaded),
        observer=loaded.host,
        registry=registry,
        registry_address=registry_address,
        loaded=loaded,
        planner=link,
        response_stores={
            name: one.thing for name, one in loaded.host.response_stores.kinds.items()
        },
    )
    loaded.host.add_observer("metrics", services.metrics)
    await gate.start()
    await loaded.host.start(config.observers)
    calm_garbage_collector()
    indexes = IndexSharing(dispatcher.indexers(), Path(socket_path).with_suffix(INDEX_SUFFIX))
    exchange = IndexExchangeClient(hub, indexes) if hub.spans_hosts else None
    is_warm = await indexes.start_warm()
    follower = WorkerFollower(dispatcher.membership)
    claims = workers_only(registry.watch(), _on_claim(hub, link))
    changes, lost = _with_losses(claims if is_warm else warmed(claims, exchange))
    following = asyncio.create_task(follower.run(changes))
    tasks = [
        following,
        *map(asyncio.create_task, _work(config, door, dispatcher, counting, hub, link)),
        asyncio.create_task(follow_supervisor(registry, services, lost)),
    ]
    end_tracing = tracing.start(config.tracing) if config.tracing is not None else None
    stop = asyncio.Event()

    def end(_: object) -> None:
        """Exit rather than route on a stale view."""
        stop.set()
        follower.informed.set()

    following.add_done_callback(end)
    try:
        # A front door that knows no worker yet would refuse what its siblings could serve.
        await wait_for_workers(follower.informed)
        await counting.ready.wait()
        await indexes.serve()
        log.debug("%d MiB are in huge pages", use_huge_pages() >> 20)
        beside = [] if exchange is None else [exchange.run()]
        tasks += map(asyncio.create_task, [*beside, watch_loop(services.metrics.turn_was_long)])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await serve_frontend(
            loaded.host,
            services,
            stop,
            on_listening=lambda port: log.info("listening on port %d", port),
            drain_timeout_s=config.runtime.drain_timeout_s,
            operations=config.operations,
            local_socket=socket_path,
        )
        if following.done():
            following.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for close in (
            indexes.close,
            follower.close,
            dispatcher.close,
            loaded.host.stop,
            gate.stop,
            registry.close,
        ):
            await close()
        if end_tracing is not None:
            await asyncio.to_thread(end_tracing)


async def wait_for_workers(
    informed: asyncio.Event, patience_s: float = _REGISTRY_PATIENCE_S
) -> None:
    """Wait until the registry has said which workers there are; log it after ``patience_s``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await informed.wait()
    if not informed.is_set():
        log.warning("the registry has not said which workers there are: the port opens once it has")
        await informed.wait()


def _place(config: Config, socket_path: str, registry_address: str) -> tuple[str, Hub]:
    """The name of this front door among all of the deployment, and where they share."""
    network, door = network_of_this_process(), Path(socket_path).stem
    name = door if network is None else f"{network.host}-{door}"
    return name, hub_of(config.registry, network, registry_address)


def _on_claim(hub: Hub, link: PlannerLink | None) -> Callable[[str, str], None]:
    """Tells those who follow a claim its name and address."""

    def on_claim(name: str, address: str) -> None:
        hub.on_claim(name, address)
        if link is not None:
            link.on_claim(name, address)

    return on_claim


def _work(
    config: Config,
    door: str,
    dispatcher: Dispatcher,
    counting: RequestLimiter,
    hub: Hub,
    link: PlannerLink | None,
) -> Iterator[Coroutine[Any, Any, None]]:
    """What a front door does beside its requests, until cancelled."""
    yield dispatcher.poll.run()
    yield counting.run()
    if config.router.router_replica_sync and (config.frontend.replicas > 1 or hub.spans_hosts):
        yield ReplicaSync(door, dispatcher.load, hub).run()
    if link is not None:
        yield link.run()


def _with_losses(
    batches: AsyncIterator[Sequence[Change]],
) -> tuple[AsyncIterator[Sequence[Change]], asyncio.Event]:
    """``batches`` unchanged, and an event that is set when a worker has left."""
    lost = asyncio.Event()

    async def noting() -> AsyncIterator[Sequence[Change]]:
        async for batch in batches:
            if any(isinstance(change, WorkerDown) for change in batch):
                lost.set()
            yield batch

    return noting(), lost


async def follow_supervisor(
    registry: RegistryClient,
    services: FrontendServices,
    lost: asyncio.Event,
    every_s: float = _SUPERVISOR_EVERY_S,
) -> None:
    """Keep current what only the supervisor knows: refused connections, and unready workers.

    It is asked every ``every_s`` seconds and whenever ``lost`` is set, so that a worker that leaves
    the registry is shown as dead at once.
    """
    while True:
        lost.clear()
        try:
            state = await registry.run_state()
            services.refused, services.unready = state.refused, state.unready
        except RegistryError as error:
            log.debug("%s", error)  # the worker follower logs that the registry is away
        with suppress(TimeoutError):
            async with asyncio.timeout(every_s):
                await lost.wait()


async def serve_frontend(
    host: PluginHost,
    services: FrontendServices,
    stop: asyncio.Event,
    *,
    on_listening: Callable[[int], None],
    drain_timeout_s: float,
    operations: Sequence[OperationsConfig] | None = None,
    local_socket: str | None = None,
    settle_s: float = 0.25,
) -> None:
    """Serve until ``stop`` is set; then accept nothing new and let running requests finish.

    ``operations`` is the section of that name; None means the default.
    ``on_listening`` is given the first door's port. After ``stop``, /ready answers 503 for
    ``settle_s`` seconds before the ports are closed, and requests on connections that were accepted
    last have four times as long to arrive. Requests that still run after ``drain_timeout_s`` are
    ended as by their own time limit.
    Raises ConfigError when a door cannot be opened.
    """
    services.operations = _operations(host, operations, services, local_socket)
    opened: list[OpenDoor] = []
    mounted: list[MountedProtocol] = []
    try:
        for number, config in enumerate(services.config.doors):
            facts = DoorFacts(
                needs_key=host.doors.kinds[config.kind].thing.needs_key(config, services),
                operations=config.operations != "off",
            )
            protocols = [
                host.protocols.kinds[one.kind].thing.mount(one, services, facts)
                for one in config.protocols
            ]
            mounted += protocols
            door = host.doors.kinds[config.kind].thing
            opened.append(
                await door.open(
                    config, services, protocols, local_socket=None if number else local_socket
                )
            )
        on_listening(opened[0].port)
        await stop.wait()
        services.draining = True
        await asyncio.sleep(settle_s)
        for one in opened:
            await one.stop_accepting()
        await asyncio.sleep(_LAST_SETTLES * settle_s)
        await services.time_limits.end_within(drain_timeout_s, _log_running)
    finally:
        for one in reversed(opened):
            await one.close()
        for protocol in mounted:
            await protocol.close()


def _operations(
    host: PluginHost,
    chosen: Sequence[OperationsConfig] | None,
    services: FrontendServices,
    local_socket: str | None,
) -> list[Operations]:
    """What operators get at the doors."""
    context = OperationsContext(services=services, local_socket=local_socket)
    return [
        host.operations.kinds[one.kind].thing(one, context)
        for one in chosen_operations(host, chosen)
    ]


def chosen_operations(
    host: PluginHost, chosen: Sequence[OperationsConfig] | None
) -> Sequence[OperationsConfig]:
    """Those of the section `operations`; None: those that are served by default."""
    kinds = host.operations.kinds
    if chosen is None:
        chosen = [kinds[name].config_class(kind=name) for name in _OPERATIONS if name in kinds]
    return chosen


def _log_running(requests: int, left_s: float) -> None:
    log.info("finishing %d request%s (at most %.0f s)", requests, "s"[: requests != 1], left_s)


def _demand_counter(config: Config, host: PluginHost) -> tuple[DemandCounter | None, InFlightLoad]:
    """An observer of ``host`` that counts for the planner, None without one; the load it sees."""
    load = InFlightLoad()
    if config.planner is None:
        return None, load
    counter = DemandCounter(config.planner, config.serving_role, others=load.of_peers)
    host.add_observer("planner", counter)
    return counter, load


def _count_placed(
    counter: DemandCounter, request: RequestSummary, placement: Placement, separate: bool
) -> None:
    counter.placed(
        request,
        placement.ticket.worker_id,
        uncached_tokens=placement.ticket.prefill_tokens,
        ahead_tokens=placement.route.candidate.load.active_prefill_tokens,
        separate=separate,
    )


def _limiter(loaded: Loaded, door: str, hub: Hub) -> RequestLimiter:
    config = loaded.config
    if not config.auth:  # nobody has limits
        return Unlimited()
    limiter = loaded.host.limiters.kinds[config.limiter.kind].thing(config.limiter)
    alone = config.frontend.replicas == 1 and not hub.spans_hosts
    return limiter.at_door(LimiterContext(door=door, alone=alone, hub=hub))


def traffic_of(loaded: Loaded) -> Traffic | None:
    """Which model serves a request, as the configuration says."""
    config = loaded.config.traffic
    return None if config is None else loaded.host.traffics.kinds[config.kind].thing(config)


def text_models(configs: Sequence[ModelConfig]) -> dict[str, TextModel]:
    """What each model reads and writes, by the name that clients give."""
    models = {}
    for config in configs:
        model = load_text_model(config.source)
        known, given = model.chat_template, config.chat_template
        source = None if known is None else known.source
        if given is not None:
            source = Path(given).read_text(encoding="utf-8")
        trusted = config.special_tokens_in_contents == "tokens"
        if source is not None and (given is not None or trusted):
            model.use_chat_template(source, text_is_text=not trusted)
        if config.max_model_len is not None:
            model.max_model_len = min(model.max_model_len, config.max_model_len)
        model.defaults = configured(model.defaults, config.generation)
        models[config.name] = model
    return models


def parsers_of(
    configs: Sequence[ModelConfig], models: Mapping[str, TextModel], host: PluginHost
) -> dict[str, Parser]:
    """Those of models whose parser is installed, which need not be so for the default one."""
    found = {}
    for config in configs:
        kind, text = host.parsers.kinds.get(config.tool_parser), models[config.name]
        if kind is not None:
            found[config.name] = kind.thing(
                ParserConfig(kind=kind.name),
                ParserModel(
                    name=config.name,
                    chat_template=None if text.chat_template is None else text.chat_template.source,
                    special_tokens={one: id_ for id_, one in text.special_texts.items()},
                    reasoning=config.reasoning_parser,
                ),
            )
    return found


def main() -> None:
    config_file, socket_path = sys.argv[1:]
    try:
        # The supervisor wrote the effective values, so the environment must not change them again.
        loaded = load_config([config_file], environ={}, only_routes=True)
        level = loaded.config.log.level.upper()
        # The format does not show these, so do not look them up for each line.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging._srcfile = None  # noqa: SLF001 - as the library's documentation advises
        form = "%(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=level, format=form, handlers=[GroupedLog()])
        # Handing a prompt to a pool of threads costs more than tokenizing its new part.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        raise_descriptor_limit()
        run_with_fast_loop(serve(loaded, os.environ[REGISTRY], socket_path))
    except CommutatorError as error:
        sys.exit(f"ERROR {error}")


class GroupedLog(logging.Handler):
    """Writes lines in groups: one write, and one wake-up of the reader, for many requests.

    A line waits for at most ``delay_s``. Warnings, and lines from outside the event loop, are
    written at once, after everything before them. Only a process that is killed loses lines: those
    of its last ``delay_s``.
    """

    def __init__(self, stream: TextIO | None = None, *, delay_s: float = 0.05) -> None:
        super().__init__()
        self._stream = stream or sys.stderr
        self._delay_s = delay_s
        self._lines: list[str] = []
        self._flush_is_due = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.append(self.format(record))
        except Exception:  # noqa: BLE001 - a line that cannot be written must not fail a request
            self.handleError(record)
            return
        if record.levelno > logging.INFO:
            self.flush()
        elif not self._flush_is_due:
            try:
                loop = asyncio.get_running_loop()
            except RuntimeError:
                self.flush()
            else:
                self._flush_is_due = True
                loop.call_later(self._delay_s, self._due)

    def flush(self) -> None:
        """Write everything now. The process also calls it at its end."""
        self.acquire()
        try:
            lines, self._lines = self._lines, []
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        except (OSError, ValueError):
            pass  # the reader went away; serving continues
        finally:
            self.release()

    def _due(self) -> None:
        self._flush_is_due = False
        self.flush()


if __name__ == "__main__":
    main()
