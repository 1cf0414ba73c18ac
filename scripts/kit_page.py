"""Writes ``docs/reference/engine-kit.md`` from the docstrings of the engine kit's public names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import contract_page as pages

PAGE = pages.ROOT / "docs" / "reference" / "engine-kit.md"
SOURCE = pages.ROOT / "plugins" / "engines" / "kit" / "src"
PUBLIC = (
    "",
    ".kv",
    ".kv.transfer",
    ".kv.tiers",
    ".nixl",
    ".launching",
    ".preflight",
    ".model_files",
    ".model_identity",
    ".model_kv",
    ".http",
    ".completions",
    ".constraints",
    ".connector_worker",
    ".pytorch",
)
"""The modules that plugins import from, below ``commutator_engine_kit``; other modules may change."""
HEAD = """# Engine kit

The public names of `commutator-engine-kit`, generated from their docstrings (`make docs`). Plugins of engines and of storage
tiers import them from the modules below, and from no other module of the kit; they are versioned as the
[contract](contract/index.md) is.
"""


def page() -> str:
    parts = [HEAD]
    for part in PUBLIC:
        module = f"commutator_engine_kit{part}"
        parts.append(f"## `{module}`\n")
        parts += sections(module)
    return "\n".join(parts)


def sections(module: str) -> Iterator[str]:
    """The description of a module, then that of each public name; it may be defined elsewhere."""
    tree = ast.parse(file_of(module).read_text())
    yield f"{pages.prose(ast.get_docstring(tree))}\n"
    exported = next(n.value for n in pages.values(tree.body) if pages.target(n) == "__all__")
    assert exported is not None
    names, homes = ast.literal_eval(exported), origins(tree)
    for name in sorted(names, key=str.lower):
        node, doc = definition(homes.get(name, module), name)
        yield f"### `{name}`\n\n{pages.section(node, doc)}"


def definition(module: str, name: str) -> tuple[ast.stmt, str]:
    """Where ``name`` is defined: in ``module``, or where that has it from."""
    tree = ast.parse(file_of(module).read_text())
    try:
        return pages.find(tree, name)
    except pages.UndocumentedError:
        origin = origins(tree).get(name)
        if origin is None:
            raise
        return definition(origin, name)


def origins(tree: ast.Module) -> dict[str, str]:
    """Each imported name, and the module that it is from."""
    return {
        alias.asname or alias.name: node.module or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def file_of(module: str) -> Path:
    top = pages.SOURCE.parent if module.split(".", maxsplit=1)[0] == "commutator" else SOURCE
    path = top.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
