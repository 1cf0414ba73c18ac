"""The rules of the layout, held against the import graph and the files themselves."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "commutator"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/src/*/__init__.py"))
EXAMPLES = sorted(path.parent for path in ROOT.glob("docs/examples/*/src/*/__init__.py"))

# A package may import those to its right only; schema, types and errors lie under everything.
LAYERS = ["testing", "cli", "runtime", "frontend", "routing", "engine", "kv", "transfer"]
FOUNDATION = {"types", "errors", "schema", "config", "text", "observe", "hookspecs", "plugins"}
PUBLIC = {
    *("types", "errors", "schema", "engine", "kv", "transfer", "text", "testing"),
    "routing.contract",
    "engine.handover",
    "engine.http",
    "engine.model_directory",
    "engine.model_identity",
    "engine.server_events",
    "engine.server_options",
}
HEAVY = {"torch", "nixl", "vllm", "sglang", "tensorrt_llm", "transformers"}


def imports_of(file: Path) -> Iterator[tuple[str, bool]]:
    """Every imported module of a file, and whether the import runs at import time."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module]
            if node.module == "commutator":
                names = [f"commutator.{alias.name}" for alias in node.names]
        top = any(node is child for child in tree.body)
        for name in names:
            yield name, top


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


@pytest.mark.parametrize("file", core_files(), ids=lambda file: str(file.relative_to(CORE)))
def test_imports_go_down_only(file: Path) -> None:
    parts = file.relative_to(CORE).with_suffix("").parts
    mine = parts[0]
    for name, _ in imports_of(file):
        assert not name.startswith("commutator_"), f"core imports the plugin {name}"
        if not name.startswith("commutator."):
            continue
        other = name.split(".")[1]
        if mine in LAYERS and other in LAYERS:
            assert LAYERS.index(other) >= LAYERS.index(mine), f"{mine} imports upwards: {name}"
        if mine in {"types", "errors", "schema"}:
            assert other in {"types", "errors", "schema"}, f"{mine} imports {name}"


@pytest.mark.parametrize("name", ["hookspecs", "types", "errors", "config.model", "schema"])
def test_the_contract_needs_next_to_nothing(name: str) -> None:
    """Importing the contract brings in attrs, cattrs, pluggy and the standard library only."""
    code = (
        "import sys, commutator." + name + "; "
        "print('\\n'.join(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    third_party = set(done.stdout.split()) - set(sys.stdlib_module_names)
    heavy = third_party & (HEAVY | {"aiohttp", "tokenizers", "numpy", "zmq", "yaml", "gguf"})
    assert not heavy, f"importing commutator.{name} imports {heavy}"


@pytest.mark.parametrize("package", PLUGINS + EXAMPLES, ids=lambda path: path.name)
def test_plugins_import_only_what_is_public(package: Path) -> None:
    for file in package.rglob("*.py"):
        for name, _ in imports_of(file):
            if name.startswith("commutator_"):
                assert name.split(".")[0] == package.name, f"{file} imports another plugin: {name}"
            if name.startswith("commutator."):
                rest = name.removeprefix("commutator.")
                exported = f'"{rest}"' in (CORE / "__init__.py").read_text()
                public = rest in PUBLIC
                assert exported or public, f"{file.relative_to(ROOT)} imports {name}, not public"


def test_plugins_can_be_listed_without_their_heavy_libraries() -> None:
    code = (
        "import sys\n"
        f"for name in {sorted(HEAVY)!r}: sys.modules[name] = None\n"
        "from commutator.plugins import load_plugins\n"
        "print([p.problem for p in load_plugins().installed if p.problem])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def tracked_python_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "*.py"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    return [ROOT / name for name in listed if (ROOT / name).exists()]


def test_files_stay_small() -> None:
    sizes = {
        str(file.relative_to(ROOT)): len(file.read_text().splitlines())
        for file in tracked_python_files()
    }
    too_long = {name: size for name, size in sizes.items() if size > 400}
    assert not too_long, f"over 400 lines: {too_long}"
    ours = sorted(size for name, size in sizes.items() if name.startswith(("core/", "plugins/")))
    assert ours[len(ours) // 2] <= 150, "most files should be under 150 lines"


def test_every_distribution_is_complete() -> None:
    for project in [ROOT / "core", *(package.parent.parent for package in PLUGINS)]:
        assert (project / "pyproject.toml").exists(), project
        assert (project / "README.md").exists(), project
        assert list(project.glob("src/*/py.typed")), project


def test_core_runs_without_any_plugin(tmp_path: Path) -> None:
    """Core alone, on an import path without the plugins, still lists what there is: nothing."""
    code = (
        "from commutator.plugins import load_plugins\n"
        "host = load_plugins(found=[])\n"
        "print(len(host.engines.kinds), len(host.routers.kinds), len(host.tiers.kinds))"
    )
    env = {**os.environ, "PYTHONPATH": str(CORE.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env
    )
    assert done.stdout.split() == ["0", "0", "0"]


def test_test_files_have_different_names() -> None:
    """Pytest imports a test file by its bare name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names)
