"""A process of another user on the same machine, which tries everything that our wires offer.

    python stranger.py '{"registry": "...", "worker": "...", "exporters": [...], "events": {...}}'

It prints one JSON object: for each attack, how it was refused, or "SUCCEEDED" and what it got.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Mapping
from contextlib import aclosing
from typing import Any

import zmq

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.worker import EngineInfo, Role, WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.kv_events.zmq_bus import replay_messages
from commutator.registry.client import RegistryClient
from commutator_engine_kit.kv.transfer.protocol import (
    ExportedMemory,
    ExportState,
    ExportUpdate,
    LentBlocks,
    LookupRequest,
    WatchRequest,
)
from commutator_engine_kit.kv.transfer.sources import Sources

NOBODY = 65534
WAIT_S = 20.0
LENDING: dict[str, tuple[Any, type[Any]]] = {
    "look_up": (LookupRequest("stranger", "any", 1, (b"k" * 32,)), LentBlocks),
    "watch": (WatchRequest("stranger", 0, ExportState.UNKNOWN, 0.1), ExportUpdate),
    "hello": ({}, ExportedMemory),
}


async def attacks(target: Mapping[str, Any]) -> dict[str, str]:
    registry = RegistryClient(target["registry"])
    worker = TokenApiClient(target["worker"])
    sources = Sources(hello_timeout_s=WAIT_S)
    found = {
        "register": await outcome(registry.register(false_record(), 3600.0)),
        "keep_alive": await outcome(registry.keep_alive(1)),
        "deregister": await outcome(registry.deregister(1, "stopped")),
        "set_draining": await outcome(registry.set_draining("prefill-0", True)),
        "set_role": await outcome(registry.set_role("prefill-0", Role.DECODE)),
        "start": await outcome(worker.start()),
        "reset_prefix_cache": await outcome(worker.reset_prefix_cache()),
        "kv_evict": await outcome(worker.kv_evict()),
        "kv_contents": await outcome(worker.kv_contents()),
        "set_peers": await outcome(worker.set_peers(["127.0.0.1:1"])),
        "generate": await outcome(generated(worker)),
    }
    for number, address in enumerate(target["exporters"]):
        for what, (question, kind) in LENDING.items():
            asked: Awaitable[object] = sources.ask(address, what, question, kind, timeout_s=WAIT_S)
            found[f"{what} at exporter {number}"] = await outcome(asked)
    for number, endpoint in enumerate(target["events"]):
        found[f"replay {number}"] = await outcome(replayed(endpoint))
    await asyncio.gather(registry.close(), worker.close(), sources.close())
    return found


async def outcome(attack: Awaitable[object]) -> str:
    try:
        async with asyncio.timeout(WAIT_S):
            return f"SUCCEEDED: {await attack!r}"[:200]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


async def generated(worker: TokenApiClient) -> list[int]:
    request = GenerateRequest(
        request_id="stranger", token_ids=(1, 2, 3), sampling=SamplingParams(max_tokens=1)
    )
    await worker.start()
    return [token async for delta in worker.generate(request) for token in delta.token_ids]


async def replayed(endpoint: str) -> int:
    """The messages of a publisher; as long as it does not answer, none."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        async with aclosing(replay_messages(context, endpoint, 0, 3.0)) as bursts:
            return sum([len(burst) async for burst in bursts])
    finally:
        context.destroy(linger=0)


def false_record() -> WorkerRecord:
    info = EngineInfo(
        kind="false",
        version="0",
        model="m",
        max_model_len=1000,
        block_size=16,
        kv_capacity_blocks=100,
    )
    return WorkerRecord(
        worker_id="prefill-0",
        engine="prefill",
        kind="reference",
        model="m",
        address="127.0.0.1:1",
        info=info,
    )


def main() -> None:
    target = json.loads(sys.argv[1])
    if os.geteuid() == 0:  # everything is imported, so that nothing of root's need be readable
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    print(json.dumps(asyncio.run(attacks(target))))


if __name__ == "__main__":
    main()
