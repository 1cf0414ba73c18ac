"""Prefill and decode apart, and storage tiers, in the same real vLLM servers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import aiohttp
import pytest
from tests.e2e.vllm.cluster import apart_config, metric, server_urls, wait_for_workers
from tests.e2e.vllm.test_vllm_disagg import (
    Answer,
    aggregated,
    at_once,
    compare,
    complete,
    forget,
    prompts,
    wait_for_usage,
)
from tests.e2e.vllm.test_vllm_tiers import hits
from tests.support.vllm_server import need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long]

PROMPTS = 8
NOTHING_USED = {"prefill-0": 0.0, "decode-0": 0.0}


@pytest.fixture(scope="module")
def both(root: Path) -> Iterator[LocalCluster]:
    need_vllm()
    config = apart_config(root)
    config["disaggregation"] = {"kind": "always", "timeout_s": 120}
    config["tiers"] = [{"kind": "dram", "capacity": "100MB", "huge_pages": "off"}]
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    with LocalCluster(config, env=env, start_timeout_s=600) as running:
        wait_for_workers(running, 2)
        yield running


@pytest.mark.proves("vllm", "KV tiers with prefill and decode apart", how="real engine on CPU")
async def test_each_side_keeps_what_it_computed_or_got(both: LocalCluster) -> None:
    """The prefill server finds prompts in its tiers and hands them over; so does decode, alone."""
    servers, asked = server_urls(both), prompts("Ballad", PROMPTS)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def through_the_front_door() -> list[Answer]:
            answers = await at_once(partial(complete, session, both.url, p) for p in asked)
            assert {answer.apart["outcome"] for answer in answers} == {"handed over"}
            return answers

        async def settled_and_forgotten() -> None:
            for url in servers.values():
                await asyncio.to_thread(forget, url)

        expected = await aggregated(session, both, asked)
        assert (await asyncio.to_thread(hits, servers["prefill-0"]))["all"] == 0
        compare(expected, await through_the_front_door())
        await asyncio.to_thread(wait_for_usage, both, NOTHING_USED)

        await settled_and_forgotten()
        transferred = metric(servers["decode-0"], "vllm:nixl_bytes_transferred_count")
        compare(expected, await through_the_front_door())
        found = await asyncio.to_thread(hits, servers["prefill-0"])
        print(f"the prefill server's tokens from outside: {found}")
        assert found.get("host", 0) > 0, found
        again = metric(servers["decode-0"], "vllm:nixl_bytes_transferred_count") - transferred
        assert again >= PROMPTS
        assert metric(servers["decode-0"], "vllm:nixl_num_failed_transfers_total") == 0
        await asyncio.to_thread(wait_for_usage, both, NOTHING_USED)

        await settled_and_forgotten()
        before = (await asyncio.to_thread(hits, servers["decode-0"])).get("host", 0)
        alone = await at_once(partial(complete, session, servers["decode-0"], p) for p in asked)
        compare(expected, alone)
        found = await asyncio.to_thread(hits, servers["decode-0"])
        print(f"the decode server's: {found}, before {before:g} of the host")
        assert found.get("host", 0) > before, found
        await asyncio.to_thread(wait_for_usage, both, NOTHING_USED)
