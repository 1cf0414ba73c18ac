"""A plugin of every kind from `commutator new-plugin`, outside the checkout: tested and served."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import openai
import pytest
import yaml

from commutator_scaffold.local_cluster import LocalCluster
from commutator_scaffold.new_plugin import KINDS

pytestmark = pytest.mark.slow


def command(folder: Path, *arguments: str, site: Path | None = None) -> str:
    """Run a module of Python in ``folder``; returns what it printed. Fails if it fails."""
    env = {**os.environ, "PYTHONPATH": "" if site is None else str(site)}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package my_KIND for each kind, all installed in its folder ``site``."""
    home = tmp_path_factory.mktemp("home")
    for kind in KINDS:
        command(home, "commutator", "new-plugin", kind, f"my_{kind}")
    command(
        home, "pip", "install", "-q", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--target", "site", *(f"./my_{kind}" for kind in KINDS),
    )  # fmt: skip
    return home


@pytest.mark.parametrize("kind", KINDS)
def test_its_tests_pass_and_its_configuration_is_valid(home: Path, kind: str) -> None:
    folder, site = home / f"my_{kind}", home / "site"
    told = command(folder, "pytest", "-q", "-p", "no:cacheprovider", site=site)
    assert " passed" in told
    if KINDS[kind].deployed:
        told = command(folder, "commutator", "config", "check", "cluster.yaml", site=site)
        assert told == "cluster.yaml: ok\n"


def test_the_command_is_listed_and_runs(home: Path) -> None:
    site = home / "site"
    assert "my-command" in command(home, "commutator", "--help", site=site)
    told = command(home, "commutator", "my-command", "--help", site=site)
    assert "Say whether the front door at URL is ready" in told


def test_all_of_them_serve_together(home: Path) -> None:
    """But for the planner, which plans the workers of one model only."""
    parts = {
        kind: yaml.safe_load((home / f"my_{kind}" / "cluster.yaml").read_text())
        for kind, about in KINDS.items()
        if about.deployed
    }
    (tier,), (evicting,) = parts["tier"]["tiers"], parts["eviction"]["tiers"]
    echo, model = parts["engine"]["models"], parts["tier"]["models"]
    config = home / "all.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "models": [*echo, *model],
                "engines": [
                    {"kind": "my_engine", "model": echo[0]["name"]},
                    {"kind": "reference", "model": model[0]["name"]},
                ],
                "router": parts["router"]["router"],
                "observers": parts["observer"]["observers"],
                "limiter": parts["limiter"]["limiter"],
                "operations": parts["operations"]["operations"],
                "frontend": parts["protocol"]["frontend"],
                "tiers": [
                    {**tier, "capacity": "64MiB"},
                    {**evicting, "capacity": "64MiB"},
                ],
            }
        )
    )
    with (
        LocalCluster(config, env={"PYTHONPATH": str(home / "site")}) as cluster,
        openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client,
    ):
        answers = {
            name: client.completions.create(
                model=name, prompt="The capital of France is", max_tokens=5, temperature=0
            )
            .choices[0]
            .text
            for name in (echo[0]["name"], model[0]["name"])
        }
        with urllib.request.urlopen(f"{cluster.url}/admin/my-operations") as told:
            assert json.load(told)["greeting"] == "Good morning!"
        question = {"question": "What is the capital of France?", "model": model[0]["name"]}
        asked = urllib.request.Request(
            f"{cluster.url}/my-protocol/ask",
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(asked) as told:
            assert "Paris" in json.load(told)["answer"]
    assert answers[echo[0]["name"]].strip() == "The capital of France is"
    assert "Paris" in answers[model[0]["name"]]
