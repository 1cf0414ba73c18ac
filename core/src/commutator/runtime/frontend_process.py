"""The front-door process: ``python -m commutator.runtime.frontend_process CONFIG SOCKET``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from commutator.config.load import Loaded, load_config
from commutator.config.model import ModelConfig
from commutator.engine.process import calm_garbage_collector
from commutator.errors import CommutatorError
from commutator.frontend.app import build_app
from commutator.frontend.server import run_with_fast_loop, serve_app
from commutator.frontend.services import SERVICES
from commutator.frontend.siblings import Siblings
from commutator.observe import tracing
from commutator.observe.grouped_log import GroupedLog
from commutator.routing.dispatcher import Dispatcher
from commutator.runtime.index_sharing import INDEX_SUFFIX, IndexSharing
from commutator.runtime.load_sharing import LoadSharing
from commutator.runtime.registry_client import RegistryClient
from commutator.runtime.worker_follower import WorkerFollower
from commutator.text.load import load_text_model
from commutator.text.model import TextModel

__all__ = ["REGISTRY", "main"]

log = logging.getLogger("commutator.runtime.frontend_process")  # not "__main__"

REGISTRY = "COMMUTATOR_REGISTRY"
"""The environment variable with the registry's "host:port"."""


async def serve(loaded: Loaded, registry_address: str, socket_path: str) -> None:
    """Serve until SIGTERM, then finish what runs. ``socket_path`` is for asking this process."""
    config = loaded.config
    dispatcher = Dispatcher(config, loaded.host)
    app = build_app(config.frontend, _text_models(config.models), dispatcher)
    app[SERVICES].registry_address = registry_address
    if config.frontend.replicas > 1:
        app[SERVICES].siblings = Siblings(Path(socket_path))
    calm_garbage_collector()
    registry = RegistryClient(registry_address)
    index_path = Path(socket_path).with_suffix(INDEX_SUFFIX)
    indexes = IndexSharing(dispatcher.cache_views(), index_path)
    await indexes.start_warm()
    follower = WorkerFollower(dispatcher)
    following = asyncio.create_task(follower.run(registry.watch()))
    tasks = [following]
    if config.tiers:
        app[SERVICES].metrics.watch_kv(lambda: dispatcher.kv.statistics)
        tasks.append(asyncio.create_task(dispatcher.kv.run()))
    app[SERVICES].metrics.watch_events(dispatcher.worker_events, dispatcher.warnings)
    app[SERVICES].metrics.watch_handovers(lambda: dispatcher.handovers.statistics)
    tasks.append(asyncio.create_task(dispatcher.handovers.run()))
    if config.router.router_replica_sync and config.frontend.replicas > 1:
        sharing = LoadSharing(Path(socket_path).stem, dispatcher.load, registry_address)
        tasks.append(asyncio.create_task(sharing.run()))
    end_tracing = tracing.start(config.tracing) if config.tracing is not None else None
    stop = asyncio.Event()

    def end(_: object) -> None:
        """A view that is no longer kept up to date is worse than a front door less."""
        stop.set()
        follower.informed.set()

    following.add_done_callback(end)
    try:
        # A front door that knows no worker yet would refuse what its siblings could serve.
        await follower.informed.wait()
        await indexes.serve()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
        await serve_app(
            app,
            config.frontend,
            stop,
            on_listening=lambda port: log.info("listening on port %d", port),
            drain_timeout_s=config.runtime.drain_timeout_s,
            reuse_port=True,
            socket_path=socket_path,
        )
        if following.done():
            following.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await indexes.close()
        await follower.close()
        await dispatcher.close()
        await registry.close()
        if end_tracing is not None:
            await asyncio.to_thread(end_tracing)


def _text_models(configs: tuple[ModelConfig, ...]) -> Mapping[str, TextModel]:
    models = {}
    for config in configs:
        model = load_text_model(config.source)
        if config.chat_template is not None:
            model.use_chat_template(Path(config.chat_template).read_text(encoding="utf-8"))
        if config.max_model_len is not None:
            model.max_model_len = min(model.max_model_len, config.max_model_len)
        models[config.name] = model
    return models


def main() -> None:
    config_file, socket_path = sys.argv[1:]
    try:
        # The supervisor wrote the effective values: the environment was heard already.
        loaded = load_config([config_file], environ={})
        level = loaded.config.log.level.upper()
        # The format does not show them, so they need not be found out for each line.
        logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
        logging._srcfile = None  # noqa: SLF001 - as the library's documentation advises
        form = "%(levelname)s %(name)s: %(message)s"
        logging.basicConfig(level=level, format=form, handlers=[GroupedLog()])
        # Handing a prompt to a pool of threads costs more than tokenizing what is new in it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        run_with_fast_loop(serve(loaded, os.environ[REGISTRY], socket_path))
    except CommutatorError as error:
        sys.exit(f"ERROR {error}")


if __name__ == "__main__":
    main()
