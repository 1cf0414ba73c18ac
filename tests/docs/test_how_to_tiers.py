"""docs/how-to/tiers.md: every command of it, on a running deployment whose blocks lie in tiers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from commutator_scaffold.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "tiers.md").read_text()
SHELL = "\n".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
COMMANDS = [shlex.split(line) for line in SHELL.splitlines() if line.startswith("commutator kv ")]
PROMPT = next(words[3] for words in COMMANDS if words[2] == "why") + " again" * 120


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("tiers")
    arguments = ["--set", f"tiers[1].path={folder}/{{worker}}"]
    with LocalCluster(ROOT / "examples" / "tiers.yaml", arguments=arguments) as running:
        yield running


def kv(cluster: LocalCluster, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "commutator", "kv", *words, "--url", cluster.url],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "COLUMNS": "120", "NO_COLOR": "1"},
    )


def told(cluster: LocalCluster, *words: str) -> Any:
    done = kv(cluster, *words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def complete(cluster: LocalCluster, prompt: str, **more: Any) -> int:
    """How many of its tokens were cached."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 1, "temperature": 0} | more
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


def _listed(cluster: LocalCluster) -> list[dict[str, Any]]:
    (tiers,) = told(cluster, "ls").values()
    listed: list[dict[str, Any]] = tiers
    return listed


def test_what_is_stored_is_listed_explained_verified_and_evicted(cluster: LocalCluster) -> None:
    assert complete(cluster, PROMPT) == 0
    (answer,) = told(cluster, "why", PROMPT).values()
    assert {block["reason"] for block in answer["blocks"]} == {"on the device"}
    for number in range(8):  # so that the engine's own memory forgets it
        complete(cluster, f"{number} and " * 240)
    (answer,) = told(cluster, "why", PROMPT).values()
    assert all(block["reusable"] for block in answer["blocks"])
    assert {block["tier"] for block in answer["blocks"]} & {"dram", "nvme"}

    tiers: list[dict[str, Any]] = []
    while tiers != (now := _listed(cluster)):
        tiers = now  # blocks may still be on their way to a slower tier
    device, _, nvme = tiers
    assert [tier["tier"] for tier in tiers] == ["device", "dram", "nvme"]
    assert 0 < device["blocks"] <= device["capacity_blocks"]
    assert nvme["blocks"] > len(answer["blocks"])
    (checks,) = told(cluster, "verify").values()
    assert all(check["intact"] == check["blocks"] > 0 for check in checks)

    told(cluster, "evict", "--all")
    (answer,) = told(cluster, "why", PROMPT).values()
    assert not any(block["tier"] for block in answer["blocks"])
    gone = {block["reason"] for block in answer["blocks"] if not block["reusable"]}
    assert any("asked" in reason for reason in gone), gone


def test_what_a_request_asked_to_keep_is_shown(cluster: LocalCluster) -> None:
    prompt = "A text that will be asked about for an hour. " * 20
    control = {"type": "persistent", "ttl": "1h"}
    complete(cluster, prompt, cache_control=control)
    deadline_s = time.monotonic() + 60
    while True:
        (answer,) = told(cluster, "why", prompt).values()
        copies = [[copy["note"] for copy in block["held"]] for block in answer["blocks"]]
        if all(copies) and all("pinned" in note for notes in copies for note in notes):
            break
        assert time.monotonic() < deadline_s, answer
    assert all("for 3" in note for notes in copies for note in notes)
    ((_, *tiers),) = told(cluster, "ls").values()
    assert sum(tier["pinned"] for tier in tiers) >= len(copies)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_of_the_page(cluster: LocalCluster, words: list[str]) -> None:
    done = kv(cluster, *words[2:])
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_metrics_tell_of_it(cluster: LocalCluster) -> None:
    with urllib.request.urlopen(f"{cluster.url}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    stored = re.search(
        r'^commutator_kv_stored_total\{source="device",tier="nvme",worker="reference-0"\} (\S+)',
        text,
        re.MULTILINE,
    )
    assert stored is not None
    assert float(stored[1]) > 0


def test_a_worker_that_is_not_there(cluster: LocalCluster) -> None:
    done = kv(cluster, "ls", "--worker", "reference-9")
    assert done.returncode == 1
    assert "has no worker 'reference-9'; it has: reference-0" in done.stderr


def test_nothing_runs_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "commutator", "kv", "ls", "--url", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "is `commutator serve` running?" in done.stderr
