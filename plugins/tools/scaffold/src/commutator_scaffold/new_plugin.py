"""``commutator new-plugin``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from importlib.resources import files
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from string import Template

import click
from attrs import frozen

import commutator
from commutator.contract import CONTRACT_VERSION
from commutator.errors import CommutatorError
from commutator_scaffold.init import small_model

_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")


@frozen
class PluginKind:
    """One kind of plugin that ``new-plugin`` can begin."""

    title: str
    """What such a plugin is, with its article."""
    summary: str
    """What the generated plugin does, in one sentence without its full stop."""
    page: str
    """The page of the documentation that says how to go on."""
    module: str
    """Whose documentation says it, too, and is installed: ``python -m pydoc MODULE``."""
    change: str
    """What to change first."""
    needs: tuple[str, ...] = ()
    """Distributions of ours that it does not work without."""
    tested_with: tuple[str, ...] = ()
    """Distributions of ours that its cluster.yaml uses, beyond `commutator[quickstart]`."""
    modules: tuple[str, ...] = ()
    """Further modules of the package, beside ``__init__``."""
    group: str = "commutator"
    """The entry-point group in which Commutator finds it."""
    deployed: bool = True
    """Whether a configuration uses it, and so its package has one."""


KINDS: Mapping[str, PluginKind] = {
    "engine": PluginKind(
        title="an engine",
        summary="An engine for Commutator that echoes its prompt",
        page="docs/how-to/write-an-engine.md",
        module="commutator.contract.engine",
        change="the connector; the engine itself is in __main__.py",
        needs=("commutator-engine-kit",),
        modules=("__main__",),
    ),
    "router": PluginKind(
        title="a routing policy",
        summary="A routing policy for Commutator that weighs load against cached blocks",
        page="docs/tutorial/first-routing-policy.md",
        module="commutator.contract.routing",
        change="the policy: begin with pick()",
    ),
    "tier": PluginKind(
        title="a storage tier",
        summary="A storage tier for Commutator that stores KV blocks in memory",
        page="docs/how-to/write-a-tier.md",
        module="commutator.contract.tier",
        change="the tier: begin with open_slots() and place()",
        # NIXL moves its blocks; a tier's default policy comes from the second.
        needs=("commutator-engine-kit[nixl]", "commutator-eviction"),
    ),
    "eviction": PluginKind(
        title="an eviction policy",
        summary="An eviction policy for Commutator: the least recently used block goes first",
        page="docs/how-to/write-a-tier.md",
        module="commutator.contract.eviction",
        change="the policy: begin with victims()",
        tested_with=("commutator-dram",),
    ),
    "observer": PluginKind(
        title="an observer",
        summary="An observer for Commutator that logs slow and failed requests",
        page="docs/reference/hooks.md#observer_registerregister",
        module="commutator.contract.observer",
        change="the observer: override the methods of what you want to watch",
    ),
    "limiter": PluginKind(
        title="a limiter",
        summary="A limiter for Commutator that counts each principal's running requests",
        page="docs/reference/contract/limiter.md",
        module="commutator.contract.limiter",
        change="what counts: begin with begin()",
    ),
    "protocol": PluginKind(
        title="a protocol",
        summary="A protocol for Commutator: a question in, an answer out",
        page="docs/how-to/write-a-protocol.md",
        module="commutator.contract.protocol",
        change="what is read and written: begin with ask() and the writer",
    ),
    "planner": PluginKind(
        title="a planner",
        summary="A planner for Commutator: a worker for each few requests",
        page="docs/explanation/planning.md",
        module="commutator.contract.planner",
        change="the policy: begin with propose()",
    ),
    "operations": PluginKind(
        title="operations",
        summary="Operations for Commutator: what operators see and do on its doors",
        page="docs/reference/hooks.md#operations_registerregister",
        module="commutator.contract.operations",
        change="the routes, and what answers them",
    ),
    "command": PluginKind(
        title="a command",
        summary="A command for Commutator that says whether a front door is ready",
        page="docs/reference/hooks.md#command_registerregister",
        module="commutator.contract.commands",
        change="the name and the line of help; the command itself is in command.py",
        modules=("command",),
        group='"commutator.commands"',
        deployed=False,
    ),
}
"""By the name that the command takes, which is also that of the catalog of plugins."""


_HELP = f"""\
Make a Python package for a plugin of your own.

KIND is one of: {", ".join(KINDS)}. NAME is the plugin's `kind` in a configuration, or the command.

The package works at once: it has an entry point, options, tests on the conformance suite of its
kind, and a cluster.yaml that uses it.
"""
_DEPLOYMENT = """\
`cluster.yaml` is a small deployment that uses the plugin. Its model is `{source}`; set
`models[0].source` to use another one.

"""


@click.command(
    "new-plugin", help=_HELP, epilog="Example: commutator new-plugin router sticky_sessions"
)
@click.argument("kind", type=click.Choice(list(KINDS)), metavar="KIND")
@click.argument("name", metavar="NAME")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where to make the package; by default a folder NAME here.",
)
def new_plugin(kind: str, name: str, folder: Path | None) -> None:
    """Make a Python package for a plugin of your own."""
    name = name.replace("-", "_")
    root = click.get_current_context().find_root()
    command = name.replace("_", "-")
    commands = root.command.list_commands(root) if isinstance(root.command, click.Group) else ()
    if kind == "command" and command in commands:
        raise click.BadParameter(
            f'"{command}" is already a command of commutator; choose another name',
            param_hint="NAME",
        )
    _check_name(kind, name)
    folder = Path(name) if folder is None else folder
    if folder.is_dir() and any(folder.iterdir()):
        raise CommutatorError(f"{folder} is not empty; remove it, or choose another --folder")
    try:
        for path, text in plugin_files(kind, name):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommutatorError(f"{error.filename} cannot be written: {error.strerror}") from error
    _say_what_next(kind, name, folder)


def plugin_files(kind: str, name: str) -> Iterator[tuple[str, str]]:
    """Path and text of every file of the package ``commutator_NAME``; ``kind`` is in ``KINDS``."""
    about = KINDS[kind]
    package = f"commutator_{name}"
    values = {
        "name": name,
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "command": name.replace("_", "-"),
        "package": package,
        "group": about.group,
        "usage": "\n".join(_usage(about, name)),
        "distribution": package.replace("_", "-"),
        "summary": about.summary,
        "page": about.page,
        "module": about.module,
        "source": small_model() or "package:commutator_smollm2",
        "requirements": _quoted(
            "attrs>=24.2", _requirement("commutator"), *map(_requirement, about.needs)
        ),
        "test_requirements": _quoted(
            _requirement("commutator[testing]"), *map(_requirement, about.tested_with), "pytest>=8"
        ),
    }

    if about.deployed:
        values["named"] = f"Its kind in a configuration is `{name}`."
        values["deployment"] = _DEPLOYMENT.format(source=values["source"])
    else:
        values["named"] = f"It is `commutator {values['command']}`."
        values["deployment"] = ""

    def filled(template: str) -> str:
        file = files(__package__) / "templates" / f"{template}.template"
        return Template(file.read_text(encoding="utf-8")).substitute(values)

    yield "pyproject.toml", filled("pyproject.toml")
    yield "README.md", filled("README.md")
    if about.deployed:
        yield "cluster.yaml", filled(f"{kind}/cluster.yaml")
    yield f"src/{package}/__init__.py", filled(f"{kind}/plugin.py")
    for module in about.modules:
        yield f"src/{package}/{module}.py", filled(f"{kind}/{module.strip('_')}.py")
    yield f"src/{package}/py.typed", ""
    yield "tests/conftest.py", filled("conftest.py")
    yield f"tests/test_{name}.py", filled(f"{kind}/test_plugin.py")


def _usage(about: PluginKind, name: str) -> tuple[str, ...]:
    """The commands that try a plugin."""
    if not about.deployed:
        return (f"commutator {name.replace('_', '-')} --help",)
    return ("commutator config check cluster.yaml", "commutator serve cluster.yaml")


def _requirement(distribution: str) -> str:
    """A requirement of one of ours for this contract version, which the next one breaks."""
    major, minor = CONTRACT_VERSION
    return f"{distribution}>={major}.{minor},<{major}.{minor + 1}"


def _quoted(*requirements: str) -> str:
    """The elements of a list in TOML."""
    return ", ".join(f'"{requirement}"' for requirement in requirements)


def _check_name(kind: str, name: str) -> None:
    """Raises click.BadParameter for a name that is invalid or taken."""
    from commutator.plugins import load_plugins

    if not _NAME.fullmatch(name) or iskeyword(name):
        raise click.BadParameter(
            f'"{name}" cannot name a Python package; use up to 40 lower-case letters, digits and '
            'underscores, such as "my_policy"',
            param_hint="NAME",
        )
    for plugin in load_plugins().installed:
        offers = [(offered.seam, offered.name) for offered in plugin.kinds]
        if plugin.name == name or (kind, name) in offers:
            raise click.BadParameter(
                f'"{name}" is already a plugin of {plugin.distribution}; choose another name',
                param_hint="NAME",
            )
    if find_spec(f"commutator_{name}") is not None:
        raise click.BadParameter(
            f"the package commutator_{name} is already installed; choose another name",
            param_hint="NAME",
        )


def _install() -> tuple[str, str]:
    """The command that installs a new plugin with its tests here, and what to know of it."""
    if find_spec("commutator_testing") is not None:
        return "pip install -e '.[test]'", ""
    for parent in Path(commutator.__file__).parents:  # a checkout of Commutator
        if (suites := parent / "plugins" / "tools" / "testing").is_dir():
            return f"pip install {shlex.quote(str(suites))} -e '.[test]'", ""
    note = "DIST is the folder with the wheels of Commutator, which have the conformance suites."
    return "pip install --find-links DIST -e '.[test]'", note


def _say_what_next(kind: str, name: str, folder: Path) -> None:
    about = KINDS[kind]
    rows = [
        (f"src/commutator_{name}/__init__.py", about.change),
        (f"tests/test_{name}.py", "the conformance suite, and a test of your own"),
    ]
    if about.deployed:
        rows.append(("cluster.yaml", "a deployment that uses it"))
    width = max(len(path) for path, _ in rows)
    click.echo(f"Made {about.title} in {folder}/:")
    for path, what in rows:
        click.echo(f"  {path:<{width}}  {what}")
    click.secho("Next:", bold=True)
    install, note = _install()
    for command in (f"cd {folder}", f"{install} && pytest", *_usage(about, name)):
        click.echo(f"  {command}")
    if note:
        click.echo(note)
    click.echo(f"How to go on: python -m pydoc {about.module}, or {about.page} of a checkout")
