"""Values given outside the files: environment variables and options of the command line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from attrs import frozen

from commutator.config.tree import Node, path_steps, path_text, put
from commutator.config.yaml_file import parse_value

__all__ = ["PREFIX", "Override", "apply_overrides", "from_environment", "from_option"]

PREFIX = "COMMUTATOR__"


@frozen
class Override:
    """One value to set; ``text`` is YAML."""

    steps: Sequence[str]
    text: str
    origin: str


def from_environment(environ: Mapping[str, str]) -> list[Override]:
    """``COMMUTATOR__ENGINES__0__REPLICAS=3`` and its like, in the order in which they apply."""
    found = [
        Override(name.removeprefix(PREFIX).lower().split("__"), text, f"env {name}")
        for name, text in environ.items()
        if name.startswith(PREFIX)
    ]
    return sorted(found, key=lambda override: [_rank(step) for step in override.steps])


def from_option(assignment: str) -> Override:
    """``--set a.b=c``. Raises ValueError when it is not of that form."""
    path, equals, text = assignment.partition("=")
    if not equals:
        raise ValueError(f"--set {assignment}: expected PATH=VALUE, such as engines[0].replicas=3")
    try:
        steps = path_steps(path.strip())
    except ValueError as error:
        raise ValueError(f"--set {assignment}: {error}") from error
    return Override(steps, text, f"--set {path.strip()}")


def apply_overrides(tree: Node, overrides: Iterable[Override], problems: list[str]) -> Node:
    """``tree`` with each override merged in; what cannot be is appended to ``problems``."""
    for override in overrides:
        if "" in override.steps:
            problems.append(f"{override.origin}: not a path; join its steps with two underscores")
            continue
        try:
            tree = put(tree, override.steps, parse_value(override.text, override.origin))
        except ValueError as error:
            text = str(error).removeprefix(f"{override.origin}: ")
            problems.append(f"{path_text(override.steps)}: {text} (from {override.origin})")
    return tree


def _rank(step: str) -> tuple[int, int, str]:
    """Indices in numeric order, so that appending one after the other leaves no gap."""
    return (0, int(step), "") if step.isdecimal() else (1, 0, step)
