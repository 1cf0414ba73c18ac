"""Reads a configuration: defaults, then files, then the environment, then options."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

from attrs import frozen

from commutator.config.check import cross_problems, fill_in
from commutator.config.disaggregation import disaggregation_problems, fill_in_disaggregation
from commutator.config.kinds import config_converter
from commutator.config.model import Config
from commutator.config.overrides import Override, apply_overrides, from_environment, from_option
from commutator.config.tiers import tier_problems
from commutator.config.tree import (
    DEFAULT,
    Node,
    find,
    from_plain,
    merge,
    origin_of,
    path_steps,
    plain,
)
from commutator.config.yaml_file import read_file
from commutator.errors import ConfigError
from commutator.plugins import PluginHost, load_plugins
from commutator.schema import StructureError, structure

__all__ = ["Loaded", "build_config", "load_config", "read_tree"]

_DEFAULTS = {"router": {"kind": "round_robin"}}


@frozen
class Loaded:
    """A configuration that passed every check, and the plugins that it was checked against."""

    config: Config
    host: PluginHost
    tree: Node
    """Where each value came from; what is not in it is a default."""


def load_config(
    files: Sequence[str | Path],
    *,
    sets: Iterable[str] = (),
    port: int | None = None,
    no_plugins: Iterable[str] = (),
    environ: Mapping[str, str] | None = None,
    found: Iterable[EntryPoint] | None = None,
) -> Loaded:
    """Read ``files``, merged in order, load the plugins, and check everything.

    ``sets`` are ``PATH=VALUE``; ``port`` is short for setting frontend.port; ``found`` replaces
    the installed plugins. Raises ConfigError with every problem, PluginError for a plugin that
    breaks the contract.
    """
    problems: list[str] = []
    environ = os.environ if environ is None else environ
    tree = read_tree(files, sets, port, environ, problems)
    refused = tuple(no_plugins)
    tree = _block(tree, refused)
    host = load_plugins(_blocked(tree), found)
    known = sorted(plugin.name for plugin in host.installed)
    problems += [
        f"--no-plugin {name}: no such plugin is installed; there are {', '.join(known) or 'none'}"
        for name in refused
        if name not in known
    ]
    return build_config(tree, host, files, problems)


def read_tree(
    files: Sequence[str | Path],
    sets: Iterable[str],
    port: int | None,
    environ: Mapping[str, str],
    problems: list[str],
) -> Node:
    """Everything that was written, merged. Raises ConfigError for files that cannot be read."""
    tree = from_plain(_DEFAULTS, DEFAULT)
    unreadable: list[str] = []
    for file in files:
        try:
            tree = merge(tree, read_file(file))
        except ConfigError as error:
            unreadable += [
                line if line.startswith(str(file)) else f"{file}: {line}" for line in error.problems
            ]
    if unreadable:
        raise ConfigError(unreadable)
    overrides = from_environment(environ)
    for assignment in sets:
        try:
            overrides.append(from_option(assignment))
        except ValueError as error:
            problems.append(str(error))
    if port is not None:
        overrides.append(Override(("frontend", "port"), str(port), "--port"))
    return apply_overrides(tree, overrides, problems)


def build_config(
    tree: Node, host: PluginHost, files: Sequence[str | Path], problems: Iterable[str] = ()
) -> Loaded:
    """Structure and check ``tree``. Raises ConfigError with ``problems`` and its own."""
    tree = fill_in_disaggregation(fill_in(tree))
    data: dict[str, Any] = plain(tree)
    found: list[tuple[str, str]] = []
    config = None
    try:
        config = structure(config_converter(host), data, Config)
    except StructureError as error:
        found += error.problems
    found += cross_problems(data)
    found += tier_problems(data, host)
    found += disaggregation_problems(data, host)
    lines = [*problems, *(_told(tree, path, text) for path, text in found)]
    if lines or config is None:
        raise ConfigError(lines, ", ".join(map(str, files)) or "configuration")
    return Loaded(config, host, tree)


def _blocked(tree: Node) -> list[str]:
    """``plugins.block`` as far as it is what it should be; its mistakes are told later."""
    node = find(tree, ("plugins", "block"))
    names = [] if node is None else plain(node)
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


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


def _told(tree: Node, path: str, text: str) -> str:
    """One problem in the words of compilers, so that editors find the place."""
    try:
        origin = origin_of(tree, path_steps(path))
    except ValueError:  # an odd key
        origin = None
    if origin is None:
        return f"{path}: {text}"
    in_file = not origin.startswith(("env ", "--"))
    return f"{origin}: {path}: {text}" if in_file else f"{path}: {text} (from {origin})"
