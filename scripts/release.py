"""Makes what is published: wheels that equal their source, a lock, an SBOM, digests, an audit.

Writes into ``dist/``: a wheel of every distribution; ``requirements.lock``, with which
``pip install --require-hashes`` installs exactly what was resolved here, for this Python and this
kind of machine; ``sbom.cdx.json`` (CycloneDX) of the same; ``SHA256SUMS`` of all of them. Then
pip-audit looks for known holes in what is locked. Its data come over the network: where it cannot
have them, nothing was audited, and the script says so and fails, unless it was told
``--without-audit``. It signs nothing: who publishes signs ``SHA256SUMS`` with their own identity.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from build_wheels import ROOT, build, projects

WANTED = ("commutator[fastokens,planner,quickstart,tiers,tracing]", "commutator-disagg")
"""What the lock has, unless others are named."""
_TOOLS = ("cyclonedx-bom>=7,<8", "pip-audit>=2.9,<3")


_SHIPPED = {
    "commutator_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf": (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}
"""SHA-256 of what a build takes from an installed package; all else is in this repository."""


def differences(wheel: Path, project: Path) -> Iterator[str]:
    """How the wheel's files differ from the project's: changed, missing, or of unknown origin."""
    source = project / "src"
    ours = {
        file.relative_to(source).as_posix(): file
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        for name in sorted(ours.keys() - names):
            yield f"{wheel.name} lacks {name}"
        for name in sorted(names):
            if name in _SHIPPED:
                if hashlib.sha256(packed.read(name)).hexdigest() != _SHIPPED[name]:
                    yield f"{wheel.name} has another {name} than the one whose digest is known"
            elif name not in ours:
                yield f"{wheel.name} has {name}, which is not in {project.name}/src"
            elif packed.read(name) != ours[name].read_bytes():
                yield f"{wheel.name} has another {name} than {project.name}/src"


def lock_lines(report: Mapping[str, Any]) -> list[str]:
    """A line for each package of pip's installation report, with the hash of its file.

    Raises ValueError for one without a hash: a source that is no file cannot be pinned.
    """
    lines: list[str] = []
    for item in report["install"]:
        name, version = item["metadata"]["name"].lower(), item["metadata"]["version"]
        digest = item["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256")
        if digest is None:
            raise ValueError(f"{name} {version} has no hash: it is not installed from a file")
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(lines)


def sums(files: Sequence[Path]) -> str:
    """What ``sha256sum --check`` reads."""
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files)
    return "".join(lines)


def resolve(wanted: Sequence[str], dist: Path, constraints: Path | None) -> list[str]:
    """The lock's lines for what pip would install, into an empty environment, with our wheels."""
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder))
        report = Path(folder) / "report.json"
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--dry-run",
        ]
        command += ["--find-links", dist, "--report", report, *wanted]
        if constraints is not None:
            command += ["--constraint", constraints]
        subprocess.run(command, check=True)
        return lock_lines(json.loads(report.read_text(encoding="utf-8")))


def describe(lock: Path, sbom: Path, *, audited: bool) -> bool:
    """Write the SBOM, and audit the lock. Whether no hole is known, or nobody wanted to know."""
    with tempfile.TemporaryDirectory() as folder:
        python = _environment(Path(folder))
        subprocess.run([python, "-m", "pip", "install", "-q", *_TOOLS], check=True)
        scripts = python.parent
        bill: list[str | Path] = [scripts / "cyclonedx-py", "requirements", lock, "-o", sbom]
        subprocess.run([*bill, "--of", "JSON", "--output-reproducible"], check=True)
        if not audited:
            print("not audited for known holes: --without-audit")
            return True
        # What is ours is known to no database, and would end the audit of all others.
        theirs = [line for line in _locked(lock) if not line.startswith("commutator")]
        listed = Path(folder) / "theirs.txt"
        listed.write_text("\n".join(theirs) + "\n", encoding="utf-8")
        audit: list[str | Path] = [scripts / "pip-audit", "--strict", "--disable-pip"]
        audit += ["--require-hashes", "-r", listed]
        return subprocess.run(audit, check=False).returncode == 0


def _locked(lock: Path) -> list[str]:
    lines = lock.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def _environment(folder: Path) -> Path:
    venv.create(folder / "env", with_pip=True)
    return folder / "env" / "bin" / "python"


def _project_of(wheel: Path, folders: Sequence[Path]) -> Path:
    """By the name that is in the project's file."""
    name = wheel.name.split("-", 1)[0].replace("_", "-")
    for folder in folders:
        if f'name = "{name}"' in (folder / "pyproject.toml").read_text(encoding="utf-8"):
            return folder
    raise ValueError(f"{wheel.name} belongs to no distribution of this repository")


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("wanted", nargs="*", default=WANTED, help="what the lock is to install")
    parser.add_argument("--constraint", type=Path, help="a file of constraints for the lock")
    parser.add_argument("--without-audit", action="store_true", help="look for no known holes")
    options = parser.parse_args()
    dist = ROOT / "dist"
    wheels, folders = build(dist), projects()
    different = [one for wheel in wheels for one in differences(wheel, _project_of(wheel, folders))]
    if different:
        print(*different, sep="\n", file=sys.stderr)
        return 1
    print(f"{len(wheels)} wheels equal their source")
    lock, sbom = dist / "requirements.lock", dist / "sbom.cdx.json"
    lines = resolve(options.wanted, dist, options.constraint)
    made_for = f"CPython {platform.python_version()} on {platform.system()} {platform.machine()}"
    header = f"# {' '.join(options.wanted)}, for {made_for}. With our wheels beside it:\n"
    how = "# pip install --no-deps --require-hashes --find-links . -r requirements.lock\n"
    lock.write_text(header + how + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"{lock.name}: {len(lines)} packages, each with its hash")
    sound = describe(lock, sbom, audited=not options.without_audit)
    (dist / "SHA256SUMS").write_text(sums([*wheels, lock, sbom]), encoding="utf-8")
    print(f"{sbom.name}, SHA256SUMS: written; not signed")
    if not sound:
        print("known holes, or no data about them: see above", file=sys.stderr)
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
