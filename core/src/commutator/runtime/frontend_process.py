"""The front-door process: ``python -m commutator.runtime.frontend_process CONFIG SOCKET``."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress

import uvloop
from aiohttp import web

from commutator.config.load import Loaded, load_config
from commutator.errors import CommutatorError
from commutator.frontend.app import build_app
from commutator.routing.dispatcher import Dispatcher
from commutator.runtime.registry_client import RegistryClient
from commutator.runtime.tls import tls_context
from commutator.runtime.worker_follower import WorkerFollower

__all__ = ["REGISTRY", "main"]

log = logging.getLogger(__name__)

REGISTRY = "COMMUTATOR_REGISTRY"
"""The environment variable with the registry's "host:port"."""


async def serve(loaded: Loaded, registry_address: str, socket: str) -> None:
    """Serve until SIGTERM, then finish what runs. ``socket`` is a second way in, for /ready."""
    config = loaded.config
    dispatcher = Dispatcher(config, loaded.host)
    runner = web.AppRunner(
        build_app(config.frontend, config.models, dispatcher, loaded.host),
        access_log=log if log.isEnabledFor(logging.DEBUG) else None,
        handler_cancellation=True,  # a client that goes away cancels its request
        shutdown_timeout=config.runtime.drain_timeout_s,
    )
    await runner.setup()
    registry = RegistryClient(registry_address)
    follower = WorkerFollower(dispatcher)
    following = asyncio.create_task(follower.run(registry.watch()))
    try:
        # A front door that knows no worker yet would refuse what its siblings could serve.
        await follower.informed.wait()
        await _listen(runner, loaded, socket)
        await _until_told_to_stop(following)
        log.info("draining")
        await runner.cleanup()
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
        await follower.close()
        await dispatcher.close()
        await registry.close()


async def _listen(runner: web.AppRunner, loaded: Loaded, socket: str) -> None:
    front = loaded.config.frontend
    context = tls_context(front.tls)
    await web.UnixSite(runner, socket).start()
    site = web.TCPSite(runner, front.host, front.port, ssl_context=context, reuse_port=True)
    await site.start()


async def _until_told_to_stop(following: asyncio.Task[None]) -> None:
    """Until SIGTERM. An error in ``following`` ends the process: it would serve a stale view."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    stopping = asyncio.create_task(stopped.wait())
    await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        stopping.cancel()
        await following


def main() -> None:
    config_file, socket = sys.argv[1:]
    try:
        # The supervisor wrote the effective values: the environment was heard already.
        loaded = load_config([config_file], environ={})
        level = loaded.config.log.level.upper()
        logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")
        uvloop.run(serve(loaded, os.environ[REGISTRY], socket))
    except CommutatorError as error:
        sys.exit(f"ERROR {error}")


if __name__ == "__main__":
    main()
