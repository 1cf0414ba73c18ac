"""Builds a wheel of every distribution into ``dist/``, or into the folder that is given.

The backend runs in this process: installing it once for each of two dozen would take minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parent.parent


def projects() -> list[Path]:
    """The folders of all distributions of this repository."""
    patterns = ("core", "plugins/*/*", "packaging/*")
    return sorted(
        file.parent for pattern in patterns for file in ROOT.glob(f"{pattern}/pyproject.toml")
    )


def build(folder: Path) -> list[Path]:
    """Replace the wheels in ``folder`` by new ones, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("commutator*.whl"):
        old.unlink()
    built: list[Path] = []
    for project in projects():
        builder = WheelBuilder(str(project))
        built += map(Path, builder.build(directory=str(folder), versions=["standard"]))
    return built


if __name__ == "__main__":
    wheels = build(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT / "dist")
    for wheel in wheels:
        print(f"{wheel.stat().st_size:>11,} bytes  {wheel.name}")
