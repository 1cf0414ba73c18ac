"""kill -9 of an encoder's worker under 64 clients: their requests are computed by the other one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tests.support.streams import engine_processes
from tests.support.tiny_encoders import write_encoder

from commutator_client import AsyncClient, ClientConfig
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

CLIENTS = 64


async def test_no_request_fails_and_no_vector_is_wrong(tmp_path: Path) -> None:
    write_encoder(tmp_path, "bert")
    config = {
        "models": [{"name": "m", "source": str(tmp_path)}],
        "engines": [{"kind": "encoder", "replicas": 2, "threads": 1}],
        "router": {"kind": "round_robin"},
        "frontend": {"protocols": [{"kind": "openai"}]},
    }
    texts = [f"w{number} w{number % 7} w3" for number in range(50)]
    with LocalCluster(config) as cluster:
        once = ClientConfig(cluster.url, max_retries=0, answer_timeout=60.0)
        async with AsyncClient(once) as client:
            expected = (await client.embed(texts)).vectors
            stop, answered = asyncio.Event(), 0

            async def ask(number: int) -> None:
                nonlocal answered
                while not stop.is_set():
                    at = (number + answered) % len(texts)
                    (found,) = (await client.embed([texts[at]])).vectors
                    assert found == pytest.approx(expected[at], abs=1e-5)
                    answered += 1

            async def until(more: int) -> None:
                wanted = answered + more
                while answered < wanted:
                    await asyncio.sleep(0.01)

            async with asyncio.TaskGroup() as group:
                for number in range(CLIENTS):
                    group.create_task(ask(number))
                await until(CLIENTS)
                killed, *_ = engine_processes(cluster, "commutator_encoder")
                os.kill(killed, signal.SIGKILL)
                await until(4 * CLIENTS)
                stop.set()
