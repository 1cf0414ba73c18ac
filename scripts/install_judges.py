"""Installs what the tests of parsers are judged by, in build/judges: a suite and chat templates.

The suite is canitoolcall, with its 469 answers of models; the templates are those that the source
archive of llama-cpp-python holds.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "judges"
SUITE = FOLDER / "suite"
TEMPLATES = FOLDER / "templates"
_SUITE = "canitoolcall==0.1.1"
_ARCHIVE = "llama-cpp-python==0.3.36"
_WITHIN = "/vendor/llama.cpp/models/templates/"
_TEMPLATES = 70


def main() -> None:
    """Nothing happens where it was done before."""
    if not SUITE.is_dir():
        _pip("install", "--no-deps", "--target", str(SUITE), _SUITE)
    if len([*TEMPLATES.glob("*.jinja")]) < _TEMPLATES:
        with tempfile.TemporaryDirectory() as folder:
            _pip(
                *("download", "--no-deps", "--no-binary", "llama-cpp-python"),
                *("--dest", folder, _ARCHIVE),
            )
            (archive,) = Path(folder).glob("*.tar.gz")
            _unpack(archive)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    subprocess.run(command, check=True)


def _unpack(archive: Path) -> None:
    TEMPLATES.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        for member in tar:
            if _WITHIN in member.name and member.name.endswith(".jinja"):
                source = tar.extractfile(member)
                assert source is not None
                (TEMPLATES / Path(member.name).name).write_bytes(source.read())


if __name__ == "__main__":
    main()
