"""Each storage tier at blocks of 1 MiB, beside raw NIXL, boto3 and LMCache's local backends."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from bench.needs import needs
from bench.recall import bucket
from bench.result import Figure

ROOT = Path(__file__).resolve().parent.parent
LMCACHE = ROOT / ".venv-lmcache" / "bin" / "python"
BLOCK_KIB = 1024
TOTAL_MIB = 64
ROUNDS = 9
PEER_ROUNDS = 3
"""LMCache's tiers have no room for more."""
TURNS = 3
TIMEOUT_S = 600
RAW = {"dram": ("nixl", ">= 0.9"), "nvme": ("nixl", ">= 0.9"), "s3": ("boto3", ">= 1")}
PEERS = {"dram": "LMCache, local CPU", "nvme": "LMCache, local disk"}

Rates = dict[tuple[str, str, str], list[float]]
"""GB/s of each turn, by tier, operation and whose they are."""


def run() -> list[Figure]:
    """Ours and the peer's in turns, in processes of their own; the turn of the median ratio."""
    rates: Rates = defaultdict(list)
    with tempfile.TemporaryDirectory() as name, bucket(Path(name)) as s3:
        folder = Path(name)
        file = _deployment(folder, s3)
        for turn in range(TURNS):
            _ours(file, rates)
            _theirs(folder / f"lmcache-{turn}", rates)
    return [
        _figure(rates, tier, operation, other, wanted)
        for tier, (raw, aim) in RAW.items()
        for operation in ("store", "load")
        for other, wanted in ((raw, aim), (PEERS.get(tier, ""), "> 1"))
        if (tier, operation, other) in rates
    ]


def _deployment(folder: Path, s3: dict[str, Any]) -> Path:
    tiers = [
        {"kind": "dram", "capacity": "1GB"},
        {"kind": "nvme", "path": f"{folder}/nvme", "capacity": "1GB"},
        s3 | {"capacity": "1GB"},
    ]
    engines = [{"kind": "reference"}]
    models = [{"name": "m", "source": "package:m"}]
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump({"models": models, "engines": engines, "tiers": tiers}))
    return file


def _ours(file: Path, rates: Rates) -> None:
    size = ["--block-kib", BLOCK_KIB, "--total-mib", TOTAL_MIB, "--rounds", ROUNDS]
    output = _output([sys.executable, "-m", "bench.tier_speed", file, *size])
    for line in map(json.loads, output.splitlines()):
        tier, operation = line["tier"], line["operation"]
        rates[tier, operation, "ours"].append(line["gb_per_s"])
        for way, rate in line["raw_gb_per_s"].items():
            rates[tier, operation, way].append(rate)


def _theirs(folder: Path, rates: Rates) -> None:
    python = needs(LMCACHE, "python scripts/install_peers.py --all")
    folder.mkdir()
    command = [python, ROOT / "bench" / "peer_lmcache.py", folder]
    answer = json.loads(_output([*command, BLOCK_KIB, TOTAL_MIB, PEER_ROUNDS]).splitlines()[-1])
    for tier, found in answer.items():
        for operation, rate in found.items():
            rates[tier, operation, PEERS[tier]].append(rate)


def _output(command: list[Any]) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )
    return done.stdout


def _figure(rates: Rates, tier: str, operation: str, other: str, aim: str) -> Figure:
    """A machine's memory is faster at one time than at another, so only one turn's are compared."""
    turns = zip(rates[tier, operation, "ours"], rates[tier, operation, other], strict=True)
    ours, theirs = sorted(turns, key=lambda turn: turn[0] / turn[1])[TURNS // 2]
    return Figure("tiers", f"{tier}, {operation}", ours, theirs, "GB/s", other, aim)
