"""Storage tiers behind HiCache in real SGLang servers: prompts found after a flush and a restart.

Memory, a disk with room for half of the prompts, and S3 with room for all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from attrs import frozen
from tests.support.server_stores import Stores
from tests.support.sglang_server import SglangServer, ask_sglang, running_sglang

from commutator.contract.tier import TierConfig
from commutator_dram.tier import DramConfig
from commutator_nvme.config import NvmeConfig

pytestmark = [pytest.mark.sglang, pytest.mark.long]

_ARGS = ("--hicache-storage-prefetch-policy=wait_complete",)
_MEGABYTES = 1 << 20
_PAGE = 16  # of 0.7 MB
_TOKENS = 275  # SGLang asks storage for 256 and more
_WHOLE = _TOKENS // _PAGE * _PAGE
_PATIENCE_S = 100.0
_PROMPTS = [list(range(start, start + _TOKENS)) for start in range(1000, 25000, 4000)]


@frozen
class Answer:
    """Greedy tokens, and how many of the prompt's came from storage."""

    ids: Sequence[int]
    stored: int


def tiers(stores: Stores, dram_megabytes: int) -> tuple[TierConfig, ...]:
    return (
        DramConfig(kind="dram", capacity=dram_megabytes * _MEGABYTES, load_timeout_s=_PATIENCE_S),
        NvmeConfig(
            kind="nvme",
            path=str(stores.folder),
            capacity=40 * _MEGABYTES,
            load_timeout_s=_PATIENCE_S,
            store_timeout_s=_PATIENCE_S,
        ),
        stores.s3,
    )


@pytest.fixture(scope="module")
def expected(sglang: SglangServer) -> list[Sequence[int]]:
    """The answers of a server that has no tiers."""
    return [answer(sglang.url, prompt).ids for prompt in _PROMPTS]


def answer(url: str, prompt: Sequence[int], **options: Any) -> Answer:
    sampling = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling, **options})
    told = json.loads(ask_sglang("POST", f"{url}/generate", body.encode()))
    details: Mapping[str, int] = told["meta_info"].get("cached_tokens_details") or {}
    return Answer(told["output_ids"], details.get("storage", 0))


def flush(url: str) -> None:
    """Forget everything but what is in the tiers, once all pages have come there."""
    ask_sglang("POST", f"{url}/flush_cache?timeout=110")


@pytest.mark.proves("sglang", "KV tiers: loaded blocks, the right tokens", how="real engine on CPU")
def test_tiers_behind_hicache(
    stores: Stores, expected: list[Sequence[int]], tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with running_sglang(first, *_ARGS, tiers=tiers(stores, dram_megabytes=20)) as server:
        computed = [answer(server.url, prompt) for prompt in _PROMPTS]
        assert [one.ids for one in computed] == expected
        assert not any(one.stored for one in computed)
        flush(server.url)
        loaded = [answer(server.url, prompt) for prompt in reversed(_PROMPTS)]
        assert [one.ids for one in loaded] == expected[::-1]
        # Memory has the last one, the disk three, and S3 all, if it answers in time.
        assert [one.stored for one in loaded[:3]] == [_WHOLE] * 3
        # Another tenant's prompt is not found, although it has the same tokens.
        foreign = answer(server.url, _PROMPTS[0], extra_key="tenant")
        assert foreign == Answer(expected[0], 0)
        flush(server.url)

    stores.damage_disk(every_bytes=5 * _MEGABYTES)  # every seventh page or so
    second.mkdir()
    with running_sglang(second, *_ARGS, tiers=tiers(stores, dram_megabytes=2)) as server:
        loaded = [answer(server.url, prompt) for prompt in reversed(_PROMPTS)]
        assert [one.ids for one in loaded] == expected[::-1]
        stored = [one.stored for one in loaded]
        assert sum(stored) > 0, "what the first server stored"
        assert min(stored[:3]) < _WHOLE, "a damaged page is computed"
        flush(server.url)
        stores.seaweed.kill()
        assert [answer(server.url, prompt).ids for prompt in _PROMPTS[:2]] == expected[:2]
        unknown = list(range(2000, 2000 + _TOKENS))
        again = [answer(server.url, unknown) for _ in range(2)]
        assert again[0].ids == again[1].ids
