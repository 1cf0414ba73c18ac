"""KV handed over by a slow network between two namespaces: it arrives late, or is given up."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.handover_rig import Worker, connect, hand_over, request, tiny_worker
from tests.support.slow_link import ONLY_TCP, Namespace, SlowLink, slow_link

from commutator.errors import EngineHandoverError

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RNG = random.Random(1)
PROMPT = [RNG.randrange(5, 95) for _ in range(300)]


@pytest.fixture
def link() -> Iterator[SlowLink]:
    try:
        with slow_link() as made:
            yield made
    except PermissionError as error:
        pytest.skip(f"no network namespaces here: {error}")


@asynccontextmanager
async def process(place: Namespace, **options: Any) -> AsyncIterator[Worker]:
    started = await asyncio.create_subprocess_exec(
        *place.command, sys.executable, "-m", "tests.support.handover_rig",
        json.dumps({**options, "host": place.host}),
        cwd=ROOT, env={**os.environ, **ONLY_TCP}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert started.stdout is not None
        async with asyncio.timeout(120):
            port = json.loads(await started.stdout.readline())["port"]
        worker = await connect(f"{place.host}:{port}")
        try:
            yield worker
        finally:
            await worker.client.close()
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()


async def test_kv_by_a_slow_link_arrives_late_or_is_given_up(link: SlowLink) -> None:
    async with tiny_worker() as alone:
        expected = await alone.tokens(request(PROMPT))
    async with process(link.slow) as prefill, process(link.fast) as decode:
        assert prefill.record.info.handover is not None
        size_bytes = 296 * prefill.record.info.handover.token_bytes
        link.limit(size_bytes)
        started_s = time.monotonic()
        deltas = await hand_over(request(PROMPT), prefill, decode)
        assert [token for delta in deltas for token in delta.token_ids] == expected
        assert time.monotonic() - started_s > 0.5, "the bytes took another way"
        await prefill.until_idle()
        await decode.until_idle()

        await decode.client.reset_prefix_cache()
        link.limit(size_bytes // 100)
        with pytest.raises(EngineHandoverError, match=r"not there after|did not arrive"):
            await hand_over(request(PROMPT), prefill, decode, lease_s=2.0, timeout_s=1.0)
        # The decode worker computes it itself, while what was asked for may still come.
        assert await decode.tokens(request(PROMPT)) == expected
        link.limit(100_000_000)
        await decode.until_idle()
        await prefill.until_idle()
