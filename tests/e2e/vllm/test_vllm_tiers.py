"""Storage tiers in real vLLM servers: prompts that rotate through a KV space of 1,152 tokens."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
from tests.support.server_stores import Stores
from tests.support.vllm_server import ask_vllm, running_vllm

from commutator.contract.tier import TierConfig
from commutator_dram.tier import DramConfig
from commutator_nvme.config import NvmeConfig

pytestmark = [pytest.mark.vllm, pytest.mark.long]

_ARGS = ("--num-gpu-blocks-override=36", "--max-model-len=1024")
_PROMPTS = 50
_CHARACTERS = 450  # some 100 tokens: three blocks of 32
_MEGABYTES = 1 << 20  # a block has 1.4 of them
_SETTLED_S = 120.0


def tiers(stores: Stores, dram_blocks: int) -> tuple[TierConfig, ...]:
    """The faster one is, the fewer of the prompts it has room for."""
    return (
        DramConfig(kind="dram", capacity=dram_blocks * 3 * _MEGABYTES // 2),
        NvmeConfig(kind="nvme", path=str(stores.folder), capacity=160 * _MEGABYTES),
        stores.s3,
    )


@pytest.fixture(scope="module")
def prompts(root: Path) -> list[str]:
    """English that does not change, each with a beginning of its own."""
    text = (root / "LICENSE").read_text()
    return [f"{n}. {text[n * 200 : n * 200 + _CHARACTERS]}" for n in range(_PROMPTS)]


@pytest.fixture(scope="module")
def expected(prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The answers of a server that has no tiers."""
    with running_vllm(tmp_path_factory.mktemp("plain"), *_ARGS) as url:
        return [answer(url, prompt) for prompt in prompts]


def answer(url: str, prompt: str) -> str:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 6, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        text: str = json.load(response)["choices"][0]["text"]
        return text


def hits(url: str) -> dict[str, float]:
    """Tokens from outside, as vLLM counts them: all of them, and by where they came from."""
    page = ask_vllm("GET", f"{url}/metrics")
    found = re.findall(
        r'^vllm:prompt_tokens_cached_by_source_total.*source="(\w+)".* (\S+)$', page, re.MULTILINE
    )
    (total,) = re.findall(r"^vllm:external_prefix_cache_hits_total.* (\S+)$", page, re.MULTILINE)
    sources = {source: float(tokens) for source, tokens in found if source != "device"}
    return {"all": float(total)} | sources


def settle(url: str) -> None:
    """Until no block is on its way to a tier any more: vLLM counts it as used so long."""
    until_s = time.monotonic() + _SETTLED_S
    while True:
        page = ask_vllm("GET", f"{url}/metrics")
        (usage,) = re.findall(r"^vllm:kv_cache_usage_perc.* (\S+)$", page, re.MULTILINE)
        if float(usage) == 0:
            return
        assert time.monotonic() < until_s, f"{float(usage):.0%} of the blocks are still held"
        time.sleep(0.2)


@pytest.mark.proves("vllm", "KV tiers: loaded blocks, the right tokens", how="real engine on CPU")
def test_tiers_in_vllm(
    stores: Stores, prompts: list[str], expected: list[str], tmp_path: Path
) -> None:
    with running_vllm(tmp_path, *_ARGS, tiers=tiers(stores, dram_blocks=80)) as url:
        assert [answer(url, prompt) for prompt in prompts] == expected
        settle(url)
        assert hits(url)["all"] == 0
        # The last ones first: they are in the fastest tier that has them.
        assert [answer(url, prompt) for prompt in reversed(prompts)] == expected[::-1]
        found = hits(url)
        assert found["host"] > 0, found
        assert found["disk"] > 0, found
        assert found["external_unspecified"] > 0, found
        assert sum(found.values()) == 2 * found["all"], found
        settle(url)

    stores.damage_disk(every_bytes=3 * _MEGABYTES)  # every second block or so
    log = tmp_path / "second"
    log.mkdir()
    with running_vllm(log, *_ARGS, tiers=tiers(stores, dram_blocks=8)) as url:
        assert [answer(url, prompt) for prompt in prompts[:20]] == expected[:20]
        found = hits(url)
        assert found["external_unspecified"] > 0, "what the first server stored"
        settle(url)
        stores.seaweed.kill()
        assert [answer(url, prompt) for prompt in prompts[:10]] == expected[:10]
        assert [answer(url, prompt) for prompt in prompts[40:]] == expected[40:]
        settle(url)
