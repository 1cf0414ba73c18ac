"""OpenAI's and Anthropic's clients check every field of every engine's answers: `make test-strict`.

`cases.py` has what they ask, of one engine with a trained model that calls, thinks and follows
schemas; `sim` is told what that one says. Each is asked by the clients of today and of the
generation before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import yaml
from attrs import frozen
from tests.support.launched_servers import wait_for_workers
from tests.support.sglang_server import need_sglang
from tests.support.trained_models import Text, Trained, trained_model
from tests.support.trained_scripts import FAMILIES
from tests.support.vllm_server import need_vllm

from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.long, pytest.mark.clients, pytest.mark.timeout(1800)]

LIMIT_S = 900
BEFORE = ("openai_before", "anthropic_before")
"""Environments of `scripts/install_clients.py`."""


@frozen
class Clients:
    """One generation of the two clients."""

    versions: str
    path: str
    """Where Python looks for them first."""


@pytest.fixture(params=["today", "before"])
def clients(request: pytest.FixtureRequest, root: Path) -> Clients:
    if request.param == "today":
        return Clients(f"openai {openai.__version__}, anthropic {anthropic.__version__}", "")
    subprocess.run([sys.executable, root / "scripts" / "install_clients.py", *BEFORE], check=True)
    folders = [root / "build" / "clients" / name for name in BEFORE]
    installed: dict[str, str] = {}
    for folder in folders:
        installed |= json.loads((folder / "installed.json").read_text())
    library = Path("lib") / f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = os.pathsep.join(str(folder / library / "site-packages") for folder in folders)
    return Clients(f"openai {installed['openai']}, anthropic {installed['anthropic']}", path)


@pytest.fixture(
    scope="module",
    params=[
        "sim",
        "reference",
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("vllm token_api", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def url(request: pytest.FixtureRequest, root: Path) -> Iterator[str]:
    kind, _, connection = str(request.param).partition(" ")
    trained = trained_model(FAMILIES["hermes"])
    config = deployment(kind, trained, root)
    if connection:
        config["engines"][0]["connection"] = connection
    patient = ("--set", "runtime.lease_s=60")  # a busy machine makes no worker a lost one
    with LocalCluster(config, arguments=patient, start_timeout_s=600, joins=False) as running:
        wait_for_workers(running, 1)
        yield running.url


def deployment(kind: str, trained: Trained, root: Path) -> dict[str, Any]:
    """One worker of the engine ``kind``, and every protocol that the clients speak."""
    engine: dict[str, Any] = {"kind": kind}
    if kind == "sim":
        # The longest first, as the others may be their beginnings.
        texts = sorted(trained.texts.values(), key=lambda one: -len(one.prompt))
        answers = [{"when": one.prompt, "say": _said(one)} for one in texts]
        engine |= {"speedup": "unlimited", "answers": answers}
    elif kind == "reference":
        engine |= {"kv_cache_bytes": "64MB", "threads": 1}
    else:
        {"vllm": need_vllm, "sglang": need_sglang}[kind]()
        (engine,) = yaml.safe_load((root / "examples" / f"{kind}.yaml").read_text())["engines"]
        engine["replicas"] = 1
    protocols = ("openai", "anthropic", "responses")
    return {
        "models": [{"name": "m", "source": str(trained.folder), "max_model_len": 2048}],
        "engines": [engine],
        "frontend": {"protocols": [{"kind": one} for one in protocols]},
    }


def _said(text: Text) -> str:
    """As `sim` says it: of a call that is forced, no more than what follows its schema."""
    said = text.answer.removesuffix(FAMILIES["hermes"].end)
    return said.removesuffix("\n</tool_call>") if said.startswith("{") else said


def test_every_case(url: str, clients: Clients, root: Path) -> None:
    command = [sys.executable, "-m", "pytest", "tests/judges/strict/cases.py"]
    command += ["-W", "ignore", "--tb=short", "-rf"]
    ran = subprocess.run(
        command,
        cwd=root,
        env=_environment(STRICT_URL=url, STRICT_VERSIONS=clients.versions, PYTHONPATH=clients.path),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-12_000:] + ran.stderr[-4_000:]
    print(f"{clients.versions}: {ran.stdout.splitlines()[-1]}")


def _environment(**more: str) -> Mapping[str, str]:
    return {**os.environ, **more}
