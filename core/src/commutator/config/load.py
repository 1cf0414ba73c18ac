"""Loads a configuration from defaults, files, environment variables and options, in this order."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from attrs import Factory, evolve, field, frozen

from commutator.config.checks import (
    config_problems,
    cross_problems,
    fill_in,
    fill_in_cluster,
    moved_problems,
)
from commutator.config.doors import port_steps, short_path
from commutator.config.kinds import (
    DEFAULT_KINDS,
    config_converter,
    default_limiter,
    with_place,
)
from commutator.config.model import Config
from commutator.config.tree import (
    DEFAULT,
    Node,
    find,
    from_plain,
    idle_resets,
    merge,
    origin_of,
    path_steps,
    path_text,
    plain,
    put,
)
from commutator.config.yaml_file import parse_value, read_file
from commutator.errors import ConfigError
from commutator.plugins import PluginHost, load_plugins
from commutator.schema import StructureError, structure

DEFAULTS = {section: {"kind": kind} for section, kind in DEFAULT_KINDS.items()}
"""The values that files, the environment and options override."""


@frozen
class Loaded:
    """A valid configuration, and the plugins that it was checked against."""

    config: Config
    host: PluginHost
    tree: Node
    """The origin of each value; values that it lacks are defaults."""
    given: Given = Factory(lambda: Given())  # noqa: PLW0108 - it is defined below

    def again(self, files: Node | None = None, sets: Iterable[Override] = ()) -> Loaded:
        """What the same sources say now, with the same plugins; ``sets`` override them all.

        ``files`` stands for the content of the files. Raises ConfigError with every problem.
        """
        given, problems = self.given, list[str]()
        tree = read_files(given.files, problems) if files is None else files
        tree = complete(tree, given.sets, given.port, given.environ, problems)
        tree = apply_overrides(tree, sets, problems)
        tree = _block(tree, given.no_plugins)
        return evolve(build_config(tree, self.host, given.files, problems), given=given)


@frozen
class Given:
    """The sources of a configuration."""

    files: Sequence[str | Path] = ()
    sets: Sequence[str] = ()
    port: int | None = None
    no_plugins: Sequence[str] = ()
    environ: Mapping[str, str] = field(factory=dict, repr=False)


def load_config(
    files: Sequence[str | Path],
    *,
    sets: Iterable[str] = (),
    port: int | None = None,
    no_plugins: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    found: Iterable[EntryPoint] | None = None,
    only_routes: bool = False,
) -> Loaded:
    """Read ``files``, merged in order, load the plugins, and check everything.

    ``sets`` are ``PATH=VALUE``; ``port`` is short for setting the port of the first door; ``found``
    replaces the installed plugins. ``only_routes`` is for front doors, whose workers run elsewhere:
    engines and tiers of kinds that are not installed here are no problem. Raises ConfigError with
    every problem, PluginError for a plugin that breaks the contract.
    """
    problems: list[str] = []
    environ = os.environ if environ is None else environ
    refused = tuple(no_plugins)
    given = Given(tuple(files), tuple(sets), port, refused, environ)
    tree = complete(read_files(files, problems), given.sets, port, environ, problems)
    tree = _block(tree, refused)
    host = load_plugins(_blocked(tree), found)
    known = sorted(plugin.name for plugin in host.installed)
    problems += [
        f"--no-plugin {name}: no such plugin is installed; installed: {', '.join(known) or 'none'}"
        for name in refused
        if name not in known
    ]
    return evolve(build_config(tree, host, files, problems, only_routes=only_routes), given=given)


def read_files(files: Sequence[str | Path], problems: list[str]) -> Node:
    """All files, merged over ``DEFAULTS``. Raises ConfigError for those that cannot be read."""
    tree = from_plain(DEFAULTS, DEFAULT)
    unreadable: list[str] = []
    for file in files:
        try:
            part = read_file(file, resets=True)
        except ConfigError as error:
            unreadable += [
                line if line.startswith(str(file)) else f"{file}: {line}" for line in error.problems
            ]
            continue
        problems += [
            f"{node.origin}: {path_text(steps)}: {_NOTHING_TO_RESET}"
            for steps, node in idle_resets(tree, part)
        ]
        tree = merge(tree, part)
    if unreadable:
        raise ConfigError(unreadable, ", ".join(map(str, files)))
    return tree


def complete(
    tree: Node,
    sets: Iterable[str],
    port: int | None,
    environ: Mapping[str, str],
    problems: list[str],
) -> Node:
    """``tree``, overridden by the environment and by options."""
    overrides = from_environment(environ)
    for assignment in sets:
        try:
            overrides.append(from_option(assignment))
        except ValueError as error:
            problems.append(str(error))
    if port is not None:
        overrides.append(Override(port_steps(tree), str(port), "--port"))
    # A reset section has its default kind again.
    return merge(from_plain(DEFAULTS, DEFAULT), apply_overrides(tree, overrides, problems))


def build_config(
    tree: Node,
    host: PluginHost,
    files: Sequence[str | Path],
    problems: Iterable[str] = (),
    *,
    only_routes: bool = False,
) -> Loaded:
    """Structure and check ``tree``. Raises ConfigError with ``problems`` and its own."""
    limiter = from_plain({"limiter": {"kind": default_limiter(host)}}, DEFAULT)
    written = tree
    tree = fill_in_cluster(fill_in(merge(limiter, tree)), host)
    data: dict[str, Any] = plain(tree)
    found = list(moved_problems(data))
    config = None
    try:
        config = structure(config_converter(host, only_routes=only_routes), data, Config)
    except StructureError as error:
        found += error.problems
    else:
        found += config_problems(config)
    found += cross_problems(data, host)
    found += _variables(written)
    found = [(path, with_place(path, text, host)) for path, text in found]
    lines = [*problems, *(_located(tree, written, path, text, files) for path, text in found)]
    if lines or config is None:
        raise ConfigError(lines, ", ".join(map(str, files)) or "configuration")
    return Loaded(config, host, tree)


_VARIABLE = re.compile(r"\$\{[^}]*\}|(?:^|(?<=/))\$[A-Za-z_]\w*(?=/|$)")


def _variables(node: Node, steps: tuple[str | int, ...] = ()) -> Iterator[tuple[str, str]]:
    """Each value with a variable of a shell in it, which nothing would ever replace."""
    value = node.value
    if isinstance(value, str) and (match := _VARIABLE.search(value)):
        name = "__".join(str(step).upper() for step in steps)
        problem = f"{match[0]} is not replaced in files; write its value, or set {PREFIX}{name}"
        yield path_text(steps), f"{problem} in the environment, which overrides this one"
    items: Iterable[tuple[str | int, Node]] = ()
    if isinstance(value, dict):
        items = [(key, inner) for key, inner in value.items() if not key.startswith("x-")]
    elif isinstance(value, list):
        items = enumerate(value)
    for step, inner in items:
        yield from _variables(inner, (*steps, step))


def blocked_plugins(plugins: Any) -> tuple[str, ...]:
    """The valid entries of `block` in the section `plugins`; later checks report the others."""
    names = plugins.get("block") if isinstance(plugins, Mapping) else None
    return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()


def _blocked(tree: Node) -> tuple[str, ...]:
    section = find(tree, ("plugins",))
    return () if section is None else blocked_plugins(plain(section))


def _block(tree: Node, refused: Sequence[str]) -> Node:
    """``tree`` with the plugins of ``--no-plugin`` added to those that the file blocks."""
    if not refused:
        return tree
    node = find(tree, ("plugins", "block"))
    written = node.value if node is not None and isinstance(node.value, list) else []
    added = [Node(name, f"--no-plugin {name}") for name in refused if name not in _blocked(tree)]
    origin = node.origin if node is not None else "--no-plugin"
    block = Node([*written, *added], origin)
    return merge(tree, Node({"plugins": Node({"block": block}, origin)}, origin))


def _located(tree: Node, written: Node, path: str, text: str, files: Sequence[str | Path]) -> str:
    """One problem as "FILE:line: path: text", a form that editors recognise."""
    try:
        steps = path_steps(path)
    except ValueError:  # a key that is no valid step
        return f"{path}: {text}"
    origin = origin_of(tree, steps)
    if origin is None:
        return f"{short_path(path, written)}: {text}"
    kind = find(tree, (*steps[:-1], "kind"))
    if kind is not None and kind.origin != DEFAULT and _source(kind.origin) != _source(origin):
        where = f'for the kind "{kind.value}", which {kind.origin} sets'
        if _later(kind.origin, origin, files):
            where += f"; {_reset_hint(steps, kind.origin)}"
        text = text.replace("unknown key;", f"unknown key {where};", 1)
    path = short_path(path, written)
    in_file = not origin.startswith(("env ", "--"))
    return f"{origin}: {path}: {text}" if in_file else f"{path}: {text} (from {origin})"


def _later(one: str, other: str, files: Sequence[str | Path]) -> bool:
    """Whether the source of the origin ``one`` is merged after that of ``other``."""
    order = [str(file) for file in files]
    ranks = [
        order.index(source)
        if source in order
        else len(order) + source.startswith("--")  # files, the environment, options
        for source in map(_source, (one, other))
    ]
    return ranks[0] > ranks[1]


def _reset_hint(steps: Sequence[str], origin: str) -> str:
    """How the value at ``steps`` is removed by the source that has set another kind."""
    if origin.startswith(("env ", "--")):
        return f"remove it with --set '{path_text(steps)}=!reset'"
    return f"remove it there with `{steps[-1]}: !reset`"


_NOTHING_TO_RESET = "there is nothing to reset: no earlier source sets it"


def _source(origin: str) -> str:
    """The file of an origin "FILE:line"; other origins unchanged."""
    file, colon, line = origin.rpartition(":")
    return file if colon and line.isdecimal() else origin


PREFIX = "COMMUTATOR__"


@frozen
class Override:
    """One value to set; ``text`` is YAML."""

    steps: Sequence[str]
    text: str
    origin: str


def from_environment(environ: Mapping[str, str]) -> list[Override]:
    """Variables such as ``COMMUTATOR__ENGINES__0__REPLICAS=3``, in the order of application."""
    found = [
        Override(name.removeprefix(PREFIX).lower().split("__"), text, f"env {name}")
        for name, text in environ.items()
        if name.startswith(PREFIX)
    ]
    return sorted(found, key=lambda override: [_rank(step) for step in override.steps])


def from_option(assignment: str) -> Override:
    """The override of ``--set a.b=c``. Raises ValueError for any other form."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment}: expected PATH=VALUE, such as engines[0].replicas=3")
    try:
        steps = path_steps(path.strip())
    except ValueError as error:
        raise ValueError(f"--set {assignment}: {error}") from error
    return Override(steps, text, f"--set {path.strip()}")


def apply_overrides(tree: Node, overrides: Iterable[Override], problems: list[str]) -> Node:
    """``tree`` with all overrides merged in; those that do not fit are added to ``problems``."""
    for override in overrides:
        if "" in override.steps:
            problems.append(f"{override.origin}: not a path; separate its steps by two underscores")
            continue
        try:
            value = parse_value(override.text, override.origin, resets=True)
            if any(idle_resets(find(tree, override.steps), value)):
                raise ValueError(_NOTHING_TO_RESET)  # noqa: TRY301 - reported with the others
            tree = put(tree, override.steps, value)
        except ValueError as error:
            text = str(error).removeprefix(f"{override.origin}: ")
            problems.append(f"{path_text(override.steps)}: {text} (from {override.origin})")
    return tree


def _rank(step: str) -> tuple[int, int, str]:
    """Sorts indices as numbers, so that appending them in order leaves no gap."""
    return (0, int(step), "") if step.isdecimal() else (1, 0, step)
