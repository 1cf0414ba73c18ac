"""Collects what ``gpu_check.py`` needs besides PyTorch, for a machine that can fetch nothing."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from build_wheels import build
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

__all__ = ["pack"]

WANTED = (
    "commutator",
    "commutator-reference",
    "commutator-dram",
    "commutator-nvme",
    "commutator-eviction",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "transformers",
)
LEFT_OUT = {"torch", "hf-xet"}
"""PyTorch has to be there, in a build for the GPU; hf-xet only downloads models."""
NIXL_PARTS = (
    *("libplugin_*", "libtelemetry_*", "telemetry_reader", "nixl_*example"),
    *("libaws*", "libazure*", "libcurl*", "libxml2*", "libs2n*", "libgusli*"),
    *("libnl-*", "libmlx5*", "libibverbs*", "libnuma*", "libzstd*", "libpull*", "libcore-*"),
    *("libuct_ib*", "libucx_perftest*", "libcore.so*"),
)
"""Of NIXL, what the backends UCX, on one machine, and POSIX do not load."""
NIXL_FOLDERS = ("nixl_ep_", ".data/", ".scripts/")
"""Expert parallelism, headers and programs."""
NIXL_PLUGINS = ("libplugin_UCX.so", "libplugin_POSIX.so")
LIMIT_BYTES = 64 << 20


def pack(path: Path, python: str) -> None:
    """Write the archive ``path``: a folder for each distribution."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-pack-") as name:
        wheels, trees = Path(name) / "wheels", Path(name) / "trees"
        names = needed()
        build(wheels)
        for wheel in wheels.glob("*.whl"):
            if parse_wheel_filename(wheel.name)[0] not in names:
                wheel.unlink()
        download(
            [f"{key}=={names[key]}" for key in names if key not in own(wheels)], python, wheels
        )
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, trees / parse_wheel_filename(wheel.name)[0])
        with tarfile.open(path, "w:xz", preset=3) as archive:
            for tree in sorted(trees.iterdir()):
                archive.add(tree, tree.name)
    size = path.stat().st_size
    verdict = "fits" if size <= LIMIT_BYTES else "does not fit"
    print(f"{path}: {size / 2**20:.1f} MiB for Python {python}, which {verdict} 64 MiB")
    print(f"there: python3 scripts/gpu_check.py --packages {path.parent}")


def needed() -> dict[str, str]:
    """The versions installed here of what is wanted, and of what that requires."""
    found: dict[str, str] = {}
    left = list(WANTED)
    while left:
        name = canonicalize_name(left.pop())
        if name in found or name in LEFT_OUT:
            continue
        distribution = importlib.metadata.distribution(name)
        found[name] = distribution.version
        if not name.startswith("nixl"):
            requirements = map(Requirement, distribution.requires or ())
            left += [
                each.name
                for each in requirements
                if each.marker is None or each.marker.evaluate({"extra": ""})
            ]
    return found


def own(wheels: Path) -> set[str]:
    return {parse_wheel_filename(wheel.name)[0] for wheel in wheels.glob("commutator*.whl")}


def download(requirements: list[str], python: str, folder: Path) -> None:
    machine = platform.machine()
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(39, 4, -1)]
    tags += [f"manylinux{old}_{machine}" for old in ("2014", "2010", "1")]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--python-version", python, "-d", str(folder)]
    command += [argument for tag in tags for argument in ("--platform", tag)]
    subprocess.run([*command, "--implementation", "cp", *requirements], check=True)


def unpack(wheel: Path, folder: Path) -> None:
    is_nixl = wheel.name.startswith("nixl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            file = name.rpartition("/")[2]
            dropped = any(fnmatch(file, part) for part in NIXL_PARTS)
            dropped &= file not in NIXL_PLUGINS
            dropped |= any(part in name for part in NIXL_FOLDERS)
            if is_nixl and dropped:
                continue
            archive.extract(name, folder)
