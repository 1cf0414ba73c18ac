"""What a scenario measures, and how a run is kept."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
from attrs import frozen

RESULTS = Path(__file__).parent / "results"


@frozen
class Figure:
    """One line of the table: ours, what it is compared with, and their ratio."""

    scenario: str
    what: str
    ours: float
    other: float | None
    unit: str
    other_name: str = ""
    aim: str = ""
    higher_is_better: bool = True

    @property
    def ratio(self) -> float | None:
        """Above 1 means better than the other, whichever way the unit runs."""
        if not self.other or not self.ours:
            return None
        return self.ours / self.other if self.higher_is_better else self.other / self.ours


def machine() -> dict[str, str | int]:
    """What the figures depend on."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "cpu": model,
        "cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def save(figures: Sequence[Figure], name: str) -> Path:
    """Write one run to ``bench/results/NAME.json``."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    run = {
        "commit": commit(),
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "figures": [{**attrs.asdict(figure), "ratio": figure.ratio} for figure in figures],
    }
    path.write_text(json.dumps(run, indent=2) + "\n")
    return path
