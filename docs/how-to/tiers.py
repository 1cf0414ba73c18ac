"""Asks about more documents than the engine's memory holds, three times; shows what was kept."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from typing import Any

from commutator_testing import LocalCluster

DOCUMENTS = [
    f"Document {number}. " + " ".join(f"word{(number * 7 + at * 13) % 97}" for at in range(120))
    for number in range(8)
]


def ask(url: str, prompt: str) -> tuple[int, int]:
    """The prompt's tokens, and how many of them were not computed again."""
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        usage: dict[str, Any] = json.load(answer)["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def settle(url: str) -> None:
    """Wait until nothing is on its way to a tier."""
    command = [sys.executable, "-m", "commutator", "kv", "stats", "--json", "--url", url]
    last = b""
    while True:
        now = subprocess.run(command, capture_output=True, check=True).stdout  # noqa: S603
        if now == last:
            return
        last = now
        time.sleep(0.5)


def ask_all(url: str, when: str) -> None:
    answers = [ask(url, document) for document in DOCUMENTS]
    tokens, cached = (sum(each) for each in zip(*answers, strict=True))
    print(f"{when}: {cached} of {tokens} prompt tokens were found")
    settle(url)


def main(config: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--set", f"tiers[1].path={folder}/{{worker}}"]
        with LocalCluster(config, arguments=arguments) as cluster:
            ask_all(cluster.url, "first time")
            ask_all(cluster.url, "second time")
        with LocalCluster(config, arguments=arguments) as cluster:
            ask_all(cluster.url, "after a restart")


if __name__ == "__main__":
    main(sys.argv[1])
