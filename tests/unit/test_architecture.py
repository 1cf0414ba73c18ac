"""The rules of the layout, held against the import graph and the files themselves."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import commutator

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "core" / "src" / "commutator"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/*/src/*/__init__.py"))
SHOWN = sorted(path.parent for path in ROOT.glob("docs/plugins/*/src/*/__init__.py"))

PAGE = ROOT / "docs" / "explanation" / "architecture.md"
ROW = re.compile(r"^\| `([\w.]+)` \| [^|]+ \|([^|]*)\|$", re.MULTILINE)
STAND_ALONE = {"errors", "backoff", "faces", "frames", "trust"}
# A room is a package or a module of core; the longest name that fits a module is its room.
ROOMS = {
    room: {*re.findall(r"`([\w.]+)`", others), "errors"}
    | (set() if room in STAND_ALONE else {"contract"})
    for room, others in ROW.findall(PAGE.read_text())
} | {"": {"contract", "errors", "faces", "hookspecs"}, "__main__": {"cli"}}
ROOMS["errors"] = set()
ROOMS["contract"] = {"errors"}
PUBLIC = {"backoff", "errors", "engine", "kv_events", "tokenizer", "frontend", "schema", "registry"}
PUBLIC |= {f"contract.{file.stem}" for file in (CORE / "contract").glob("[a-z]*.py")}
PUBLIC |= {"launcher.child", "launcher.ports", "launcher.process", "planning"}
# What single plugins of ours use of core beside the faces.
BESIDE = {
    "commutator_certs": {"trust.identity"},
    "commutator_limits": {"registry.hub"},
    "commutator_models": {"plugins"},
    "commutator_slo": {"cli.added"},
    "commutator_tuning": {"config.load", "config.model", "config.show", "config.tunable"},
}
# Released with core, of core's own version, and so free to import its internals:
# replays run core's routing, the console shows its parts, the doctor checks what would be started,
# and suites test against them.
KIT = "commutator_engine_kit"
KIT_PAGE = ROOT / "docs" / "reference" / "engine-kit.md"
PUBLIC_OF_KIT = set(re.findall(rf"^## `({KIT}[\w.]*)`$", KIT_PAGE.read_text(), re.MULTILINE))
# Replays run the planner and its tuning in virtual time; responses in NATS count as those in
# memory, and connect as the event bus does; suites start deployments as the demo does. Scores and
# classes are read, routed and refused as embeddings are. KServe's parameters are read as OpenAI's
# fields, and protocols take values out of JSON as OpenAI's does; the gRPC door has the keys of the
# HTTP door, and serves its own user over HTTP, as the endpoint picker does, which listens as it
# does. Operators' commands ask a front door as the console's do. New versions and new values are
# judged by the same statistics.
BUILDS_ON = {
    "commutator_doctor": {"commutator_console"},
    "commutator_endpoint_picker": {"commutator_grpc", "commutator_http"},
    "commutator_grpc": {"commutator_http"},
    "commutator_anthropic": {"commutator_openai"},
    "commutator_kserve": {"commutator_openai"},
    "commutator_pooling": {"commutator_openai"},
    "commutator_replay": {"commutator_slo", "commutator_tuning"},
    "commutator_responses": {"commutator_openai"},
    "commutator_responses_nats": {"commutator_nats", "commutator_responses"},
    "commutator_rollout": {"commutator_console", "commutator_traffic"},
    "commutator_slo": {"commutator_console"},
    "commutator_testing": {"commutator_scaffold"},
    "commutator_tuning": {"commutator_traffic"},
}
OF_CORE = {
    KIT,
    "commutator_replay",
    "commutator_rollout",
    "commutator_console",
    "commutator_doctor",
    "commutator_kubernetes_tools",
    "commutator_scaffold",
    "commutator_testing",
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
            if node.module in {"commutator", "commutator.contract"}:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
        top = any(node is child for child in tree.body)
        for name in names:
            yield name, top


def core_files() -> list[Path]:
    return sorted(CORE.rglob("*.py"))


def room_of(module: str) -> str:
    """The longest room that ``module``, named without ``commutator.``, belongs to."""
    while module not in ROOMS:
        module = module.rpartition(".")[0]
    return module


def module_name(file: Path) -> str:
    parts = file.relative_to(CORE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize("file", core_files(), ids=lambda file: str(file.relative_to(CORE)))
def test_imports_go_down_only(file: Path) -> None:
    mine = module_name(file)
    room = room_of(mine)
    for name, _ in imports_of(file):
        assert not name.startswith("commutator_"), f"core imports the plugin {name}"
        if name.startswith("commutator.") and name != "commutator.__version__":
            other = room_of(name.removeprefix("commutator."))
            allowed = other == room or other in ROOMS[room]
            assert allowed, f"{mine} ({room}) must not import {name} ({other})"


def test_the_rooms_have_no_circle() -> None:
    order = list(graphlib.TopologicalSorter(ROOMS).static_order())
    assert set(order) == set(ROOMS)


def test_no_module_of_core_imports_in_a_circle() -> None:
    names = {module_name(file) for file in core_files()}
    graph: dict[str, set[str]] = {}
    for file in core_files():
        found = {name.removeprefix("commutator.") for name, _ in imports_of(file)}
        graph[module_name(file)] = (found & names) - {module_name(file), ""}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("file", core_files(), ids=lambda file: str(file.relative_to(CORE)))
def test_no_import_of_ours_is_hidden(file: Path) -> None:
    """Neither in a function nor behind TYPE_CHECKING; faces (``__init__``) import on first use.

    The hooks name the contract in annotations alone: modules of commands need the marker quickly.
    """
    if file.name == "__init__.py" or module_name(file).startswith(("cli", "hookspecs")):
        return
    for name, top in imports_of(file):
        assert top or not name.startswith("commutator"), f"{module_name(file)}: {name}"


def test_packages_are_concepts() -> None:
    """About a dozen modules at most; more is a package that wants to be two."""
    for folder in {file.parent for file in core_files()}:
        modules = [file for file in folder.glob("*.py") if file.name != "__init__.py"]
        # The contract has one module for each kind of plugin and each group of values. Raised once,
        # on purpose, from 18, as the ceiling of names below from 80, when the contract grew to 0.2:
        # what a request asks of an engine, what an engine offers, and documents of a registry;
        # and by one for response stores, by one for traffic.
        most = 30 if folder.name == "contract" else 13
        assert len(modules) <= most, f"{folder.relative_to(CORE)} has {len(modules)} modules"


def modules_loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after ``statement``, beyond those before."""
    code = f"import sys; before = set(sys.modules); {statement}; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


CONTRACT = sorted(f"contract.{file.stem}" for file in (CORE / "contract").glob("[a-z]*.py"))


@pytest.mark.parametrize("name", CONTRACT)
def test_the_contract_needs_attrs_alone(name: str) -> None:
    """Importing a module of the contract loads contract, errors, attrs, the standard library."""
    loaded = modules_loaded_by(f"import commutator.{name}")
    ours = {module for module in loaded if module.split(".")[0] == "commutator"}
    rooms = {".".join(module.split(".")[1:2]) for module in ours}
    assert rooms <= {"", "contract", "errors", "faces"}
    third_party = {module.split(".")[0] for module in loaded - ours}
    assert third_party - set(sys.stdlib_module_names) <= {"attr", "attrs"}


def test_commutator_and_each_public_name_load_the_contract_and_pluggy_alone() -> None:
    face = modules_loaded_by("import commutator")
    ours = {module for module in face if module.startswith("commutator")}
    assert ours == {"commutator", "commutator.faces"}
    loaded = modules_loaded_by(
        "import commutator; [getattr(commutator, name) for name in commutator.__all__]"
    )
    tops = {module.split(".")[0] for module in loaded} - set(sys.stdlib_module_names)
    assert tops <= {"commutator", "attr", "attrs", "pluggy"}
    rooms = {".".join(m.split(".")[1:2]) for m in loaded if m.split(".")[0] == "commutator"}
    assert rooms <= {"", "contract", "errors", "faces", "hookspecs"}


def test_the_contract_has_at_most_ninety_names() -> None:
    assert len(commutator.__all__) == len(set(commutator.__all__)) <= 90
    assert set(commutator.__all__) <= set(dir(commutator))


@pytest.mark.parametrize("package", PLUGINS + SHOWN, ids=lambda path: path.name)
def test_plugins_import_only_what_is_public(package: Path) -> None:
    """The names of ``commutator``, its errors, and the faces of the packages for their kind."""
    for file in package.rglob("*.py"):
        for name, _ in imports_of(file):
            if name.startswith("commutator_"):
                # The simulated engine brings its model in virtual time for replays.
                replayed = package.name == "commutator_sim" and name.startswith("commutator_replay")
                alone = replayed or name.split(".")[0] in {
                    *(one.name for one in package.parent.iterdir()),  # of the same distribution
                    KIT,
                    *BUILDS_ON.get(package.name, ()),
                }
                assert alone, f"{file} imports another plugin: {name}"
                kits = package.name != KIT and name.split(".")[0] == KIT
                assert not kits or name in PUBLIC_OF_KIT, f"{file} imports {name}, not public"
            if name.startswith("commutator.") and package.name not in OF_CORE:
                rest = name.removeprefix("commutator.")
                exported = rest in commutator.__all__
                public = rest in PUBLIC or rest in BESIDE.get(package.name, ())
                assert exported or public, f"{file.relative_to(ROOT)} imports {name}, not public"


def test_lists_of_names_stand_in_faces_alone() -> None:
    """Pages and other packages read those; elsewhere an underscore says what is private."""
    faces = {f"commutator.{name}" for name in (*PUBLIC, "hookspecs")} | PUBLIC_OF_KIT
    for file in [*core_files(), *(file for package in PLUGINS for file in package.rglob("*.py"))]:
        parts = file.relative_to(ROOT).with_suffix("").parts
        module = ".".join(parts[parts.index("src") + 1 :])
        if file.name != "__init__.py" and module not in faces:
            assert "\n__all__ = " not in file.read_text(), f"{module} is no face"


def test_a_plugin_declares_the_distributions_that_it_builds_on() -> None:
    """Otherwise pip would not install them, and only this checkout had them."""
    owners = {
        package.name: tomllib.loads((package.parents[1] / "pyproject.toml").read_text())["project"]
        for package in PLUGINS + SHOWN
    }
    for package in PLUGINS + SHOWN:
        project = owners[package.name]
        extras = project.get("optional-dependencies", {}).values()
        declared = {
            re.split(r"[\[<>=~; ]", line)[0]
            for line in [*project.get("dependencies", ()), *(one for few in extras for one in few)]
        }
        used = {
            name.split(".")[0]
            for file in package.rglob("*.py")
            for name, _ in imports_of(file)
            if name.startswith("commutator_")
        } - {one.name for one in package.parent.iterdir()}
        missing = {owners[one]["name"] for one in used if one in owners} - declared
        assert not missing, f"{project['name']} does not declare {missing}"


def test_plugins_can_be_listed_without_their_heavy_libraries() -> None:
    code = (
        "import sys\n"
        f"for name in {sorted(HEAVY)!r}: sys.modules[name] = None\n"
        "from commutator.plugins import load_plugins\n"
        "print([p.problem for p in load_plugins().installed if p.problem])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
