"""Greedy tokens of a real model stay the same when its blocks come back from storage tiers.

The arena holds hardly more than the longest prompt, so that nearly every block of a second round
has to come back from memory, from disk or from S3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.e2e.identity_prompts import PROMPTS
from tests.support.kv_rig import setups
from tests.support.oracle import SOURCE
from tests.support.reference_options import sized
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.tiered_engine import TieredEngine

from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import LlamaModel, load_model

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

NEW_TOKENS = 8
BLOCK_SIZE = 16
AT_ONCE = 6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def model() -> LlamaModel:
    return load_model(locate_model(SOURCE))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    text = load_text_model(SOURCE)
    return [text.encode(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def expected(model: LlamaModel, prompts: list[list[int]]) -> list[list[int]]:
    """From an engine without any tier and without a prefix cache."""
    engine = ReferenceEngine(model, *sized(num_blocks=400, prefix_caching=False))
    made: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for key, prompt in enumerate(prompts):
        engine.submit(key, GenerateRequest(request_id=str(key), token_ids=prompt, sampling=greedy))
    while engine.load().running + engine.load().waiting:
        for key, delta in engine.step():
            made[key] += delta.token_ids
    return list(made.values())


@pytest.fixture
def s3(seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TIER_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TIER_S3_SECRET", SECRET_KEY)
    return {
        "kind": "s3",
        "bucket": seaweed.new_bucket(),
        "endpoint": seaweed.endpoint,
        "access_key": {"env": "TIER_S3_KEY"},
        "secret_key": {"env": "TIER_S3_SECRET"},
    }


def start(
    model: LlamaModel, prompts: list[list[int]], *tiers: dict[str, Any]
) -> tuple[TieredEngine, int]:
    """An engine with the smallest arena for these prompts; and how many blocks that is."""
    num_blocks = (max(map(len, prompts)) + NEW_TOKENS) // BLOCK_SIZE + 6
    options = sized(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    return TieredEngine(model, setups(*tiers), options), num_blocks


@pytest.mark.proves(
    "reference", "KV tiers: loaded blocks, the right tokens", how="real engine on CPU"
)
def test_memory_disk_and_s3_together(
    model: LlamaModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    s3: dict[str, Any],
    tmp_path: Path,
) -> None:
    size = model.config.kv_bytes(BLOCK_SIZE, model.dtype.itemsize)
    on_evict = {"write": "on_evict"}
    tiers = (
        {"kind": "dram", "capacity": 50 * size},
        {"kind": "nvme", "path": str(tmp_path), "capacity": 40 * size, **on_evict},
        {**s3, **on_evict},
    )
    engine, num_blocks = start(model, prompts, *tiers)
    total = sum(len(prompt) // BLOCK_SIZE for prompt in prompts)
    assert total > num_blocks + 50 + 40, "all of them fit above S3"
    with engine:
        said = engine.answers(prompts, NEW_TOKENS, at_once=AT_ONCE)
        assert said == expected
        engine.until_settled(120)
        # Backwards: what was used last is nearest.
        said = engine.answers(prompts[::-1], NEW_TOKENS, first_key=100, at_once=AT_ONCE)
        assert said[::-1] == expected
        engine.until_settled(120)
        loaded = engine.loaded()
        print(f"\narena {num_blocks} blocks, prompts {total} blocks, loaded {loaded}")
        assert all(loaded.values()), loaded
        for tier in engine.connector.statistics().tiers:
            # Not run: another request computed or evicted blocks before the load began.
            assert set(tier.loads) <= {"loaded", "not run"}, tier


@pytest.mark.parametrize("kind", ["dram", "nvme", "s3"])
def test_one_tier(
    kind: str,
    model: LlamaModel,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    local: dict[str, dict[str, Any]] = {
        "dram": {"kind": "dram", "capacity": "400MB"},
        "nvme": {"kind": "nvme", "path": str(tmp_path), "capacity": "400MB"},
    }
    entry = local[kind] if kind in local else request.getfixturevalue("s3")
    some = range(32, len(prompts))  # those with many blocks
    chosen, wanted = [prompts[n] for n in some], [expected[n] for n in some]
    engine, _ = start(model, prompts, entry)
    with engine:
        assert engine.answers(chosen, NEW_TOKENS, at_once=AT_ONCE) == wanted
        engine.until_settled(120)
        said = engine.answers(chosen, NEW_TOKENS, first_key=100, at_once=AT_ONCE)
        assert said == wanted
        engine.until_settled(120)
        assert engine.loaded()[kind] > 100, engine.connector.statistics()
