"""vLLM's own client, `vllm bench serve`, run from its environment against any front door."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from attrs import frozen

__all__ = ["DATA", "ClientRun", "bench_serve"]

# The `vllm` script needs a distribution of that very name, which the CPU build is not.
_PROGRAM = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
DATA = {
    "random": ("--random-input-len=128", "--random-output-len=16"),
    "prefix_repetition": (
        "--prefix-repetition-prefix-len=128",
        "--prefix-repetition-suffix-len=32",
        "--prefix-repetition-num-prefixes=4",
        "--prefix-repetition-output-len=16",
    ),
}
"""By data set: prompts with nothing in common, and prompts that begin alike."""


@frozen
class ClientRun:
    """What the client counted and measured."""

    completed: int
    failed: int
    requests_per_s: float
    mean_ttft_ms: float
    output_tokens: int


def bench_serve(
    python: Path,
    url: str,
    model: str,
    tokenizer: str,
    data: str,
    *,
    prompts: int = 40,
    at_once: int = 8,
    seed: int = 0,
    more: Sequence[str] = (),
    timeout_s: float = 600.0,
) -> ClientRun:
    """One run. Raises subprocess.CalledProcessError with what the client printed as its output."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            f"--base-url={url}", f"--model={model}", f"--tokenizer={tokenizer}",
            f"--dataset-name={data}", *DATA[data], f"--num-prompts={prompts}", f"--seed={seed}",
            f"--max-concurrency={at_once}", "--temperature=0", "--disable-tqdm", "--save-result",
            f"--result-dir={folder}", "--result-filename=result.json", *more,
        ]  # fmt: skip
        subprocess.run(
            [python, "-c", _PROGRAM, *arguments],
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            check=True,
            timeout=timeout_s,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        told = json.loads((Path(folder) / "result.json").read_text())
    return ClientRun(
        completed=told["completed"],
        failed=told["failed"],
        requests_per_s=told["request_throughput"],
        mean_ttft_ms=told["mean_ttft_ms"],
        output_tokens=told["total_output_tokens"],
    )
