"""Two real workers with tiers: greedy answers are the same whichever computes the prompt."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.identity_prompts import PARAGRAPH, PROMPTS
from tests.support.handover_rig import Worker, hand_over
from tests.support.kv_rig import host
from tests.support.oracle import SOURCE

from commutator.config.kinds import config_converter
from commutator.contract.engine import LaunchContext, ModelConfig
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.tier import TierConfig
from commutator.contract.worker import WorkerRecord
from commutator.engine.client import TokenApiClient
from commutator.errors import EngineUnavailableError
from commutator.schema import structure
from commutator.tokenizer.load import load_text_model
from commutator_reference.config import ReferenceConfig
from commutator_reference.plugin import ReferenceConnector

pytestmark = pytest.mark.slow

MODEL = ModelConfig(name="smollm2", source=SOURCE, max_model_len=4096)
TOKENS = 16
TIER = {"kind": "dram", "capacity": "300MB", "huge_pages": "off"}


def greedy(token_ids: Sequence[int], salt: str | None = None) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=uuid.uuid4().hex, token_ids=list(token_ids), sampling=sampling, cache_salt=salt
    )


@asynccontextmanager
async def worker(folder: Path, name: str, **options: Any) -> AsyncIterator[Worker]:
    """A process as the supervisor starts it, with a tier in memory."""
    config = ReferenceConfig(kind="reference", kv_cache_bytes=400 << 20, **options)
    tier = structure(config_converter(host()), TIER, TierConfig)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    context = LaunchContext(
        worker_id=name, model=MODEL, host="127.0.0.1", port=port, state_dir=folder, tiers=(tier,)
    )
    launched = ReferenceConnector().launch_plan(config, context)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *launched.argv[1:], env={**os.environ, **launched.env}
    )
    client = TokenApiClient(launched.address, answer_timeout_s=60)
    try:
        async with asyncio.timeout(120):
            while True:
                assert process.returncode is None, "the worker has ended"
                try:
                    info = await client.start()
                    break
                except EngineUnavailableError:
                    await asyncio.sleep(0.1)
        record = WorkerRecord(
            worker_id=name,
            engine="reference",
            kind="reference",
            model="smollm2",
            address=launched.address,
            info=info,
        )
        yield Worker(client, record)
        await client.close()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.long
async def test_greedy_answers_are_those_of_one_worker(tmp_path: Path) -> None:
    encode = load_text_model(SOURCE).encode
    texts = [PROMPTS[0], PROMPTS[3], PROMPTS[28], PROMPTS[40], PARAGRAPH * 25]
    prompts = [encode(text) for text in texts]
    assert max(map(len, prompts)) > 900
    async with (
        worker(tmp_path, "prefill", role="prefill", max_tokens_per_step=160) as prefill,
        worker(tmp_path, "decode", role="decode") as decode,
    ):
        expected = [await prefill.tokens(greedy(each, "alone")) for each in prompts]
        # Neither holds anything, then both a part of it; and all that again out of the tiers.
        for in_tiers, part in itertools.product((False, True), (None, 2)):
            if in_tiers:
                await prefill.client.reset_prefix_cache()
                await decode.client.reset_prefix_cache()
            for each, answer in zip(prompts, expected, strict=True):
                salt = f"{part}"
                if part is not None and not in_tiers:
                    await decode.tokens(greedy(each[: len(each) // part + 1], salt))
                    await prefill.tokens(greedy(each[: 2 * len(each) // 3 + 1], salt))
                asked = greedy(each, salt)
                deltas = await hand_over(asked, prefill, decode, timeout_s=300)
                assert [token for delta in deltas for token in delta.token_ids] == answer
            for side in (prefill, decode):
                await side.until_idle()
        pulls = (await decode.client.handover_statistics()).pulls
        assert decode.record.info.handover is not None
        largest = max(map(len, prompts)) * decode.record.info.handover.token_bytes
        assert pulls.nixl_bytes >= pulls.pulled_bytes > largest
        assert pulls.pull_s > 0
        assert not pulls.failed
