"""A process of a run with one server of every wire that asks for the run's secret, for fuzzers.

``python -m tests.support.fuzz_closed_target [FOLDER]``: with certificates in FOLDER it is a host of
a cluster, whose wires have TLS, and which publishes KV events with CURVE; without, they are those
of one machine. Prints their addresses; reports as ``fuzz_target`` does, and how many connections
were refused.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import pytest
from tests.support.certificates import CLUSTER, on_a_network
from tests.support.fuzz_target import (
    Watched,
    answer_reports,
    hub_services,
    idle_engine,
    lend_nothing,
    publish_events,
)

from commutator.launcher.child import calm_garbage_collector
from commutator.registry.memory import MemoryRegistry
from commutator.registry.server import RegistryServer
from commutator.trust import Network, RunSecret, TlsFiles, adopt, refused_connections
from commutator_engine_kit import EventPublisher
from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.server import TokenApiServer

SECRET = RunSecret.from_text("a secret that no fuzzer knows")


async def serve(watched: Watched, network: Network | None) -> None:
    async with AsyncExitStack() as stack:
        token_api = TokenApiServer(idle_engine())
        token_port = await token_api.start("127.0.0.1", 0)
        stack.push_async_callback(token_api.stop)
        registry = RegistryServer(MemoryRegistry(), hub_services())
        addresses = {"token": f"127.0.0.1:{token_port}", "registry": await registry.start()}
        stack.push_async_callback(registry.stop)
        exporter = BlockExporter(lambda: None, look_up=lend_nothing)
        addresses["exporter"] = exporter.start()
        stack.callback(exporter.stop)
        if network is not None:
            publisher = EventPublisher(keep_messages=100)
            stack.callback(publisher.close)
            publish_events(publisher)
            source = publisher.source
            assert source.replay_endpoint is not None
            assert source.server_key is not None
            addresses |= {"events": source.endpoint, "replay": source.replay_endpoint}
            addresses["server key"] = source.server_key
        calm_garbage_collector()
        print(json.dumps(addresses), flush=True)
        await answer_reports(watched, lambda: {"refused": sum(refused_connections().values())})


def host_in(folder: str) -> Network:
    """The host whose certificate is in ``folder``."""
    names = (str(Path(folder) / name) for name in ("ca.pem", "h1.pem", "h1.key"))
    return Network(CLUSTER, "h1", "0.0.0.0", "127.0.0.1", TlsFiles(*names))


def main() -> None:
    network = host_in(sys.argv[1]) if sys.argv[1:] else None
    watched = Watched()
    with ExitStack() as stack:
        stack.enter_context(adopt(SECRET))
        if network is not None:
            patched = stack.enter_context(pytest.MonkeyPatch.context())
            stack.enter_context(on_a_network(patched, network))
        runner = asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(watched))
        stack.enter_context(runner).run(serve(watched, network))


if __name__ == "__main__":
    main()
