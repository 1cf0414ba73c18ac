"""What another host reaches of a deployment of vLLM servers with tiers that hand KV over."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
from tests.e2e.vllm.cluster import apart_config, wait_for_workers
from tests.e2e.vllm.test_vllm_disagg import complete, prompts
from tests.support.open_ports import listeners, of_others, outside_host
from tests.support.vllm_server import need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.security]


async def test_another_host_finds_the_front_door_and_nothing_of_vllm(
    root: Path, tmp_path: Path
) -> None:
    """So it cannot attack UCX there either, which moves what is handed over and stored."""
    need_vllm()
    config = apart_config(root)
    config["disaggregation"] = {"kind": "always", "timeout_s": 120}
    config["tiers"] = [
        {"kind": "dram", "capacity": "100MB", "huge_pages": "off"},
        {"kind": "nvme", "path": str(tmp_path / "{worker}"), "capacity": "100MB"},
    ]
    with outside_host() as outside:
        before = outside.reachable_ports()
        anywhere = ("--set", "frontend.host=0.0.0.0")
        with LocalCluster(config, arguments=anywhere, start_timeout_s=600) as running:
            wait_for_workers(running, 2)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
                answer = await complete(session, running.url, prompts("Harbour", 1)[0])
            assert answer.apart["outcome"] == "handed over", "what opens late is open"
            door = int(running.url.rpartition(":")[2])
            open_ports = listeners(running)
            print(f"open: {sorted(set(open_ports))}")
            assert len(open_ports) > 5
            assert {port for _, port in of_others(open_ports)} == {door}
            assert outside.reachable_ports() - before == {door}
