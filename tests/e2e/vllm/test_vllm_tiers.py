"""Storage tiers in real vLLM servers: prompts that rotate through a KV space of 1,152 tokens."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import frozen
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.vllm_server import ask_vllm, running_vllm

from commutator import Secret, TierConfig
from commutator_dram import DramConfig
from commutator_nvme.config import NvmeConfig
from commutator_s3.config import S3TierConfig

pytestmark = [pytest.mark.vllm, pytest.mark.long]

_ARGS = ("--num-gpu-blocks-override=36", "--max-model-len=1024")
_PROMPTS = 50
_CHARACTERS = 450  # some 100 tokens: three blocks of 32
_MEGABYTES = 1 << 20  # a block has 1.4 of them
_SETTLED_S = 120.0


@frozen
class Stores:
    """What lies below a server, with room for less of the prompts the faster it is."""

    seaweed: SeaweedServer
    folder: Path
    bucket: str

    def tiers(self, dram_blocks: int) -> tuple[TierConfig, ...]:
        return (
            DramConfig(kind="dram", capacity=dram_blocks * 3 * _MEGABYTES // 2),
            NvmeConfig(kind="nvme", path=str(self.folder), capacity=160 * _MEGABYTES),
            S3TierConfig(
                kind="s3",
                bucket=self.bucket,
                endpoint=self.seaweed.endpoint,
                access_key=Secret(env="TEST_S3_KEY"),
                secret_key=Secret(env="TEST_S3_SECRET"),
            ),
        )


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    folder = tmp_path_factory.mktemp("stores")
    server = SeaweedServer(folder / "seaweed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
        monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
        try:
            server.start()
            yield Stores(server, folder / "nvme", server.new_bucket())
        finally:
            server.close()


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
    with running_vllm(tmp_path, *_ARGS, tiers=stores.tiers(dram_blocks=80)) as url:
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

    _damage(stores.folder)
    log = tmp_path / "second"
    log.mkdir()
    with running_vllm(log, *_ARGS, tiers=stores.tiers(dram_blocks=8)) as url:
        assert [answer(url, prompt) for prompt in prompts[:20]] == expected[:20]
        found = hits(url)
        assert found["external_unspecified"] > 0, "what the first server stored"
        settle(url)
        stores.seaweed.kill()
        assert [answer(url, prompt) for prompt in prompts[:10]] == expected[:10]
        assert [answer(url, prompt) for prompt in prompts[40:]] == expected[40:]
        settle(url)


def _damage(folder: Path) -> None:
    """Every second block or so on the disk has a wrong byte."""
    files = [file for file in folder.iterdir() if file.stat().st_size > 100 * _MEGABYTES]
    assert files
    for file in files:
        with file.open("r+b") as opened:
            for start in range(0, file.stat().st_size, 3 * _MEGABYTES):
                opened.seek(start + _MEGABYTES // 2)
                byte = opened.read(1)
                opened.seek(start + _MEGABYTES // 2)
                opened.write(bytes([byte[0] ^ 0xFF]))
