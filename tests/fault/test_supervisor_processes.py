"""Whatever is killed, stopped or interrupted: the rest goes on, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from tests.fault.stand_in_plugin import deployment, install, write

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return install(tmp_path_factory.mktemp("site"))


@contextlib.contextmanager
def running(env: dict[str, str], **changes: Any) -> Iterator[LocalCluster]:
    with LocalCluster(deployment(**changes), env=env) as cluster:
        yield cluster


def supervisor(cluster: LocalCluster) -> psutil.Process:
    assert cluster.process is not None
    return psutil.Process(cluster.process.pid)


def everyone(cluster: LocalCluster) -> list[psutil.Process]:
    """The supervisor's whole family, also children that left their parents."""
    run_ids = {value for p in workers(cluster) if (value := p.environ().get("COMMUTATOR_RUN"))}
    family = [supervisor(cluster), *supervisor(cluster).children(recursive=True)]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("COMMUTATOR_RUN") in run_ids and process not in family:
                family.append(process)
    return family


def with_word(cluster: LocalCluster, word: str) -> list[psutil.Process]:
    found = []
    for child in supervisor(cluster).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # a zombie counts as gone
            if any(word in argument for argument in child.cmdline()):
                found.append(child)
    return found


def workers(cluster: LocalCluster) -> list[psutil.Process]:
    return with_word(cluster, "stand_in")


def frontends(cluster: LocalCluster) -> list[psutil.Process]:
    return with_word(cluster, "commutator.frontend.process")


def guards(cluster: LocalCluster) -> list[psutil.Process]:
    return with_word(cluster, "guard.py")


def state_folder(cluster: LocalCluster) -> Path:
    return Path(guards(cluster)[0].cmdline()[-1])


def alive(processes: list[psutil.Process]) -> list[str]:
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


def eventually(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.05)


def states(cluster: LocalCluster) -> dict[str, str]:
    return {w["worker_id"]: w["state"] for w in cluster.health()["workers"]}


BOTH_READY = {"worker-0": "ready", "worker-1": "ready"}


async def stream(url: str, max_tokens: int, started: asyncio.Event | None = None) -> str:
    """Streams one answer; "complete", or how it broke."""
    body = {"model": "m", "prompt": "a", "max_tokens": max_tokens, "stream": True}
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/completions", json=body) as answer,
        ):
            async for line in answer.content:
                if started is not None:
                    started.set()
                if line.startswith(b"data: [DONE]"):
                    return "complete"
                if line.startswith(b"data: ") and "error" in json.loads(line[6:]):
                    return "error event"
    except aiohttp.ClientError as error:
        return type(error).__name__
    return "cut off"


def test_sigterm_ends_everything_and_cleans_up(env: dict[str, str]) -> None:
    with running(env, engines=[{"kind": "stand_in", "families": True}]) as cluster:
        family, folder = everyone(cluster), state_folder(cluster)
        assert len(family) == 6  # supervisor, guard, front door, worker and its two children
        assert folder.is_dir()
        assert cluster.stop() == 0
        eventually(lambda: not alive(family), 5, "no process left")
        assert not folder.exists()


def test_kill_9_of_the_supervisor_leaves_nothing(env: dict[str, str]) -> None:
    engines = [{"kind": "stand_in", "name": "worker", "replicas": 2, "families": True}]
    with running(env, engines=engines) as cluster:
        family, folder = everyone(cluster), state_folder(cluster)
        assert len(family) == 9
        workers(cluster)[0].suspend()
        supervisor(cluster).kill()
        eventually(lambda: not alive(family), 8, f"no process left: {alive(family)}")
        eventually(lambda: not folder.exists(), 2, "the state folder is removed")


async def test_kill_9_of_the_supervisor_lets_streams_finish(env: dict[str, str]) -> None:
    with running(env, frontend={"replicas": 2}) as cluster:
        family, started = everyone(cluster), [asyncio.Event() for _ in range(6)]
        streams = [asyncio.create_task(stream(cluster.url, 60, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        supervisor(cluster).kill()
        assert await asyncio.gather(*streams) == ["complete"] * 6
        eventually(lambda: not alive(family), 8, f"no process left: {alive(family)}")


def test_a_killed_guard_is_replaced_and_does_its_work(env: dict[str, str]) -> None:
    with running(env) as cluster:
        (first,) = guards(cluster)
        first.kill()
        eventually(lambda: [g for g in guards(cluster) if g != first], 5, "a second guard")
        family = everyone(cluster)
        supervisor(cluster).kill()
        eventually(lambda: not alive(family), 8, "no process left")


def test_a_killed_worker_comes_back_and_the_other_stays(env: dict[str, str]) -> None:
    engines = [{"kind": "stand_in", "name": "worker", "replicas": 2, "families": True}]
    with running(env, engines=engines) as cluster:
        first, second = workers(cluster)
        (orphan,) = [p for p in first.children() if "in-group" in p.cmdline()]
        first.kill()
        eventually(lambda: states(cluster) != BOTH_READY, 2, "the dead worker is seen")
        eventually(lambda: states(cluster) == BOTH_READY, 15, "it is back")
        assert second in workers(cluster)
        assert len(workers(cluster)) == 2
        assert not alive([orphan]), "what the dead worker had started is gone, too"
        assert "was killed by SIGKILL; starting it again in 0.1 s" in cluster.log()


def test_a_killed_front_door_comes_back(env: dict[str, str]) -> None:
    with running(env, frontend={"replicas": 2}) as cluster:
        assert len(frontends(cluster)) == 2
        victim, survivor = frontends(cluster)
        victim.kill()
        eventually(lambda: not alive([victim]), 2, "one is gone")
        with contextlib.suppress(ConnectionResetError):  # by the socket of a thread that still ends
            states(cluster)
        assert states(cluster) == BOTH_READY, "the other one answers"
        eventually(lambda: len(frontends(cluster)) == 2, 10, "it is back")
        assert survivor in frontends(cluster)
        outcomes = [asyncio.run(stream(cluster.url, 2)) for _ in range(8)]
        assert outcomes == ["complete"] * 8


def test_a_frozen_worker_leaves_routing_and_is_replaced(env: dict[str, str]) -> None:
    with running(env) as cluster:
        frozen, other = workers(cluster)
        frozen.suspend()
        eventually(lambda: not alive([frozen]), 10, "it is ended")
        eventually(lambda: states(cluster) == BOTH_READY, 15, "another one is there")
        assert other in workers(cluster)
        assert "is stopped" in cluster.log()


async def test_sigterm_lets_running_requests_finish(env: dict[str, str]) -> None:
    with running(env, frontend={"replicas": 2}) as cluster:
        started = [asyncio.Event() for _ in range(6)]
        streams = [asyncio.create_task(stream(cluster.url, 60, event)) for event in started]
        await asyncio.gather(*(event.wait() for event in started))
        supervisor(cluster).terminate()
        await asyncio.sleep(0.7)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", int(cluster.url.rpartition(":")[2]))
        assert await asyncio.gather(*streams) == ["complete"] * 6
        assert await asyncio.to_thread(cluster.stop) == 0


async def test_the_drain_has_a_limit(env: dict[str, str]) -> None:
    runtime = {"drain_timeout_s": 1}
    with running(env, runtime=runtime) as cluster:
        family, started = everyone(cluster), asyncio.Event()
        endless = asyncio.create_task(stream(cluster.url, 4000, started))
        await started.wait()
        supervisor(cluster).terminate()
        assert await asyncio.wait_for(endless, 10) != "complete"
        assert await asyncio.to_thread(cluster.stop) == 0
        eventually(lambda: not alive(family), 5, "no process left")


async def test_a_second_sigint_stops_at_once(env: dict[str, str]) -> None:
    with running(env) as cluster:
        family, started = everyone(cluster), asyncio.Event()
        endless = asyncio.create_task(stream(cluster.url, 4000, started))
        await started.wait()
        supervisor(cluster).send_signal(signal.SIGINT)
        await asyncio.sleep(1)
        assert supervisor(cluster).is_running(), "the first one drains"
        supervisor(cluster).send_signal(signal.SIGINT)
        assert cluster.process is not None
        assert await asyncio.to_thread(cluster.process.wait, 10) == 130
        eventually(lambda: not alive(family), 10, "no process left")
        assert await endless != "complete"


def test_a_worker_that_cannot_start_is_tried_again_and_reported(env: dict[str, str]) -> None:
    engines = [
        {"kind": "stand_in", "name": "good"},
        {"kind": "stand_in", "name": "bad", "crash": True},
    ]
    cluster = LocalCluster(deployment(engines=engines), env=env)
    with ThreadPoolExecutor(1) as starting:
        started = starting.submit(cluster.__enter__)
        eventually(cluster.log_path.exists, 10, "the process was launched")
        try:
            for expected in (
                "[bad-0] no coal left",
                "bad-0 exited with status 3: no coal left; starting it again in 0.2 s",
                "waiting for bad-0",
            ):
                cluster.wait_for_log(expected)
            assert not started.done(), "it is ready only with both"
        finally:
            cluster.stop()
        with pytest.raises(RuntimeError, match="the cluster exited"):
            started.result()


def serve(config: Path, env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commutator", "serve", str(config), *arguments],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_a_port_in_use_is_one_clear_error(env: dict[str, str], tmp_path: Path) -> None:
    file = write(deployment(), tmp_path / "c.yaml")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = serve(file, env, "--port", str(port))
    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_machine_lacks_is_reported_at_once(env: dict[str, str], tmp_path: Path) -> None:
    config = deployment(
        models=[{"name": "m", "source": "/nowhere/m.gguf", "chat_template": "/nowhere/t.jinja"}],
        frontend={
            "api_keys": [{"env": "COMMUTATOR_TEST_NO_SUCH_KEY"}],
            "tls": {"cert_file": "/nowhere/c.pem", "key_file": "/nowhere/k.pem"},
        },
        runtime={"state_dir": "/nowhere"},
    )
    done = serve(write(config, tmp_path / "c.yaml"), env)
    assert done.returncode == 1
    for path in ("models[0].source", "models[0].chat_template", "frontend.api_keys[0]",
                 "frontend.tls", "runtime.state_dir"):  # fmt: skip
        assert f"  {path}: " in done.stderr
    assert "Traceback" not in done.stderr


def test_json_logs_are_json_line_by_line(env: dict[str, str]) -> None:
    with running(env, log={"format": "json"}) as cluster:
        url = cluster.url
        asyncio.run(stream(url, 1))
        cluster.stop()
        lines = [json.loads(line) for line in cluster.log().splitlines()]
        assert {line["process"] for line in lines} == {
            "supervisor",
            "worker-0",
            "worker-1",
            "frontend-0",
        }
        always = {"timestamp", "severity_text", "severity_number", "level", "process", "stream"}
        assert all({*always, "body"} <= set(line) for line in lines)
        assert any(line["body"] == f"ready: {url}" for line in lines)


@pytest.mark.parametrize("keep_connections", [True, False])
async def test_a_drain_under_load_loses_no_request(
    env: dict[str, str], keep_connections: bool
) -> None:
    """Every request is answered, or its connection is refused so that it can go elsewhere."""
    engines = [{"kind": "stand_in", "delay_s": 0.001}]
    outcomes: Counter[str] = Counter()
    body = {"model": "m", "prompt": "a", "max_tokens": 1}
    stopped = asyncio.Event()

    async def client(session: aiohttp.ClientSession, url: str) -> None:
        while not stopped.is_set():
            try:
                async with session.post(f"{url}/v1/completions", json=body) as answer:
                    await answer.read()
                    outcomes[str(answer.status)] += 1
            except aiohttp.ClientConnectorError:
                outcomes["refused"] += 1
                await asyncio.sleep(0.05)
            except aiohttp.ClientError as error:
                outcomes[repr(error)] += 1

    with running(env, engines=engines, frontend={"replicas": 2}) as cluster:
        connector = aiohttp.TCPConnector(force_close=not keep_connections, limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            clients = [asyncio.create_task(client(session, cluster.url)) for _ in range(16)]
            await asyncio.sleep(1.5)
            supervisor(cluster).terminate()
            with contextlib.suppress(TimeoutError):  # the outcomes tell what is missing
                async with asyncio.timeout(30):
                    while not outcomes["refused"]:
                        await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            stopped.set()
            await asyncio.gather(*clients)
        assert set(outcomes) == {"200", "refused"}, outcomes
        assert outcomes["200"] > 50


async def probe(url: str, seen: list[int]) -> None:
    """Asks a door whether it is ready, on new connections, until it refuses one."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        with contextlib.suppress(aiohttp.ClientError):
            while True:
                async with session.get(f"{url}/ready") as answer:
                    seen.append(answer.status)
                await asyncio.sleep(0.02)


async def test_load_balancers_learn_that_it_leaves_before_the_port_closes(
    env: dict[str, str],
) -> None:
    runtime = {"drain_notice_s": 2.0}
    with running(env, frontend={"replicas": 2}, runtime=runtime) as cluster:
        seen: list[int] = []
        probing = asyncio.create_task(probe(cluster.url, seen))
        while not seen:
            await asyncio.sleep(0.02)
        supervisor(cluster).terminate()
        while seen[-1] == 200:
            await asyncio.sleep(0.02)
        said_s, served = time.monotonic(), 0
        while time.monotonic() - said_s < 1.5:
            assert await stream(cluster.url, 2) == "complete", "new requests are served meanwhile"
            served += 1
        assert served
        assert await asyncio.to_thread(cluster.stop) == 0
        await asyncio.wait_for(probing, 5)
        assert seen[seen.index(503) :].count(200) == 0
        assert time.monotonic() - said_s > 2.0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_waits_for_load_balancers_that_are_not_there(
    env: dict[str, str], number: signal.Signals
) -> None:
    with running(env, runtime={"drain_notice_s": 60.0}) as cluster:
        if number == signal.SIGINT:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{cluster.url}/ready", timeout=5).close()
        supervisor(cluster).send_signal(number)
        assert cluster.process is not None
        cluster.process.wait(20)
