"""What is released equals its source, and is pinned by hashes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import release  # noqa: E402 - it lies in scripts/


@pytest.fixture
def project(tmp_path: Path) -> Path:
    package = tmp_path / "thing" / "src" / "commutator_thing"
    package.mkdir(parents=True)
    for name in ("__init__.py", "tier.py", "py.typed"):
        (package / name).write_text(f"# {name}\n")
    cached = package / "__pycache__"
    cached.mkdir()
    (cached / "tier.cpython-311.pyc").write_bytes(b"\0")
    return tmp_path / "thing"


def wheel_of(project: Path, **changed: str | None) -> Path:
    """A wheel with the project's files, but for those that are given, by their stem."""
    path = project / "commutator_thing-0.2.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as packed:
        packed.writestr("commutator_thing-0.2.0.dist-info/METADATA", "Name: commutator-thing\n")
        for file in (project / "src").rglob("*.*"):
            if file.is_file() and file.suffix != ".pyc" and file.stem not in changed:
                packed.write(file, file.relative_to(project / "src").as_posix())
        for stem, text in changed.items():
            if text is not None:
                packed.writestr(f"commutator_thing/{stem}.py", text)
    return path


def test_a_wheel_that_equals_its_source(project: Path) -> None:
    assert list(release.differences(wheel_of(project), project)) == []


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({"tier": "# other\n"}, "another commutator_thing/tier.py"),
        ({"tier": None}, "lacks commutator_thing/tier.py"),
        ({"planted": "import os\n"}, "has commutator_thing/planted.py"),
    ],
    ids=["changed", "missing", "planted"],
)
def test_a_wheel_that_differs_is_told(
    project: Path, changed: dict[str, str | None], found: str
) -> None:
    (told,) = release.differences(wheel_of(project, **changed), project)
    assert found in told


def test_a_real_wheel_equals_its_source(tmp_path: Path) -> None:
    folder = ROOT / "plugins" / "routers" / "round_robin"
    (built,) = WheelBuilder(str(folder)).build(directory=str(tmp_path), versions=["standard"])
    assert list(release.differences(Path(built), folder)) == []


def package(name: str, version: str, digest: str | None) -> dict[str, Any]:
    archive = {} if digest is None else {"archive_info": {"hashes": {"sha256": digest}}}
    return {"metadata": {"name": name, "version": version}, "download_info": archive}


def test_each_package_is_locked_with_the_hash_of_its_file() -> None:
    report = {"install": [package("PyYAML", "6.0.4", "ab" * 32), package("attrs", "26.1", "cd")]}
    assert release.lock_lines(report) == [
        "attrs==26.1 --hash=sha256:cd",
        f"pyyaml==6.0.4 --hash=sha256:{'ab' * 32}",
    ]


def test_what_has_no_hash_cannot_be_locked() -> None:
    with pytest.raises(ValueError, match=r"thing 1\.0 has no hash"):
        release.lock_lines({"install": [package("thing", "1.0", None)]})


def test_digests_are_what_sha256sum_reads(tmp_path: Path) -> None:
    files = [tmp_path / "one.whl", tmp_path / "two.json"]
    for file in files:
        file.write_bytes(file.name.encode())
    (tmp_path / "SHA256SUMS").write_text(release.sums(files))
    assert release.sums(files[:1]) == f"{hashlib.sha256(b'one.whl').hexdigest()}  one.whl\n"
    command = ["sha256sum", "--check", "SHA256SUMS"]
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode == 0
    files[0].write_bytes(b"other")
    assert subprocess.run(command, cwd=tmp_path, check=False).returncode != 0
