"""Runs mypy over every distribution, the tests, the benchmarks and the scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted({path.parent for path in ROOT.glob("**/src/*/__init__.py")})
PACKAGES = [path for path in SOURCES if not any(part.startswith(".venv") for part in path.parts)]


def main() -> int:
    folders = [package.parent for package in PACKAGES] + [ROOT / "scripts"]
    paths = os.pathsep.join(map(str, folders))
    env = {**os.environ, "MYPYPATH": paths}
    command = [sys.executable, "-m", "mypy"]
    for package in PACKAGES:
        command += ["-p", package.name]
    failed = subprocess.run(command, cwd=ROOT, env=env, check=False).returncode
    others = [name for name in ("tests", "bench", "scripts") if any(ROOT.glob(f"{name}/**/*.py"))]
    failed |= subprocess.run(
        [sys.executable, "-m", "mypy", *others], cwd=ROOT, env=env, check=False
    ).returncode
    return failed


if __name__ == "__main__":
    sys.exit(main())
