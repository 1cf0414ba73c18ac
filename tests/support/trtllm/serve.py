"""The stand-in as a command: ``python serve.py CHECKPOINT --host H --port P ...``, as trtllm-serve.

What it serves is the model that the front door knows, whatever the checkpoint's name.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.support.trtllm.reference_source import running_stand_in

from commutator.contract.engine import ModelConfig
from commutator_reference.config import ReferenceConfig


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="trtllm-serve")
    parser.add_argument("checkpoint")
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max_seq_len", type=int, required=True)
    parser.add_argument("--extra_llm_api_options", type=Path, required=True)
    return parser.parse_args()


async def serve(given: argparse.Namespace) -> None:
    options: dict[str, Any] = yaml.safe_load(given.extra_llm_api_options.read_text())
    cache = options["kv_cache_config"]
    if not options.get("enable_iter_perf_stats") or not cache.get("enable_block_reuse"):
        raise SystemExit("the stand-in has statistics and block reuse only")
    model = ModelConfig(name="m", source=given.checkpoint, max_model_len=given.max_seq_len)
    config = ReferenceConfig(kind="reference", block_size=32, kv_cache_bytes=200 << 20, threads=1)
    buffer = cache.get("event_buffer_max_size", 0)
    running = running_stand_in(model, config, port=given.port, event_buffer=buffer)
    async with running as (url, _, source, _):
        transceiver = options.get("cache_transceiver_config") or {}
        source.transfer_timeout_s = transceiver.get("kv_transfer_timeout_ms", 60_000) / 1000
        print(f"serving {given.checkpoint} at {url}", flush=True)
        stopped = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(serve(parse()))
