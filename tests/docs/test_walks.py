"""The page of walks names what exists, and running clusters pass the files that it names."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))

import walks_page  # noqa: E402 - it is in scripts/


def functions_of(file: str) -> set[str]:
    """Qualified names of all functions of a file, nested ones without ``<locals>``."""
    found: set[str] = set()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(prefix + child.name)
                visit(child, f"{prefix}{child.name}.")
            else:
                visit(child, prefix)

    visit(ast.parse((ROOT / file).read_text()), "")
    return found


def test_the_page_names_functions_that_exist() -> None:
    steps = walks_page.named(walks_page.PAGE.read_text())
    assert len(steps) > 100
    missing = [step for step in steps if step.function not in functions_of(step.file)]
    assert not missing, "run `make walks`"


@pytest.mark.long
@pytest.mark.parametrize("name", walks_page.WALKS)
def test_running_clusters_pass_the_files_of_the_page(name: str) -> None:
    """Timing decides a few: a file may come or go, but the way is the page's."""
    walk = walks_page.WALKS[name]
    section = walks_page.PAGE.read_text().split(f"## {walk.title}\n")[1].split("\n## ")[0]
    page = {step.file for step in walks_page.named(section)}
    passed = {step.file for step in walks_page.follow(walk)}
    assert len(page ^ passed) <= 2, f"run `make walks`: {sorted(page ^ passed)}"
