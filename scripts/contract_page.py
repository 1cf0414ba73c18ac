"""Writes ``docs/reference/contract/`` from the docstrings of ``commutator.contract``."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import commutator

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference" / "contract"
SOURCE = ROOT / "core" / "src" / "commutator"
HEAD = """# Contract

The classes and values that plugins implement and exchange with core, generated from their docstrings
(`make docs`). Plugins import the names from `commutator`; what only plugins of one seam need, from that seam's module,
as its page says. See [the hooks](../hooks.md) for when core calls a plugin, and the
[configuration](../configuration/index.md) for the options of each kind.

| page | what it holds | names |
|---|---|---|
"""
ROOT_MODULE = "contract"
"""The one whose names stand on the first page, below the list of the others."""
MODULES = [*sorted((SOURCE / "contract").glob("*.py")), SOURCE / "hookspecs.py"]
VALUES = ast.Assign | ast.AnnAssign


class UndocumentedError(Exception):
    """Public names, fields or methods have no docstring."""


def pages() -> dict[str, str]:
    """The pages by their files' names: the first, and one for each module."""
    if missing := undocumented():
        raise UndocumentedError("without a docstring: " + ", ".join(missing))
    found, rows, first = {}, [], ""
    for file in MODULES:
        tree, names = read(file)
        title = ".".join(file.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        doc = prose(ast.get_docstring(tree))
        sections = [
            f"## `{name}`\n\n{where(name, title)}{section(*find(tree, name))}" for name in names
        ]
        if title == ROOT_MODULE:
            first = "\n".join([f"{doc}\n", *sections])
            continue
        name = title.removeprefix(f"{ROOT_MODULE}.")
        found[f"{name}.md"] = "\n".join([f"# Contract: {name}\n\n{doc}\n", *sections])
        links = ", ".join(f"[`{one}`]({name}.md#{one.lower()})" for one in names)
        rows.append(f"| [{name}]({name}.md) | {sentence(doc)} | {links} |")
    return {"index.md": HEAD + "\n".join(rows) + f"\n\n{first}"} | found


def sentence(doc: str) -> str:
    """The first one."""
    return doc.split("\n", maxsplit=1)[0].partition(". ")[0].rstrip(".:").replace("|", "\\|") + "."


def undocumented() -> list[str]:
    """Each public name, field or method of the contract without a docstring."""
    missing = []
    for file in MODULES:
        tree, names = read(file)
        for name in names:
            node, doc = find(tree, name)
            if not doc:
                missing.append(f"{file.stem}.{name}")
            if isinstance(node, ast.ClassDef):
                described = members(node)
                missing += [f"{file.stem}.{name}.{m}" for _, m, doc in described if not doc]
    return missing


def read(file: Path) -> tuple[ast.Module, list[str]]:
    """A module and its public names, in the order of their definitions."""
    tree = ast.parse(file.read_text())
    exported = next(n.value for n in values(tree.body) if target(n) == "__all__")
    assert exported is not None
    public = ast.literal_eval(exported)
    defined = [getattr(node, "name", None) or target(node) for node in tree.body]
    return tree, [name for name in defined if name in public]


def values(body: list[ast.stmt]) -> Iterator[ast.Assign | ast.AnnAssign]:
    return (node for node in body if isinstance(node, VALUES))


def target(node: ast.stmt) -> str:
    """The name that an assignment defines; empty for every other statement."""
    if not isinstance(node, VALUES):
        return ""
    name = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
    return name.id if isinstance(name, ast.Name) else ""


def find(tree: ast.Module, name: str) -> tuple[ast.stmt, str]:
    """The definition of a public name, and its docstring."""
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node, prose(ast.get_docstring(node))
        if target(node) == name:
            return node, text(after)
    raise UndocumentedError(f"{name} is public and not defined")


def section(node: ast.stmt, doc: str) -> str:
    if isinstance(node, ast.FunctionDef):
        return f"`{signature(node)}`\n\n{doc}\n"
    if not isinstance(node, ast.ClassDef):
        assert isinstance(node, VALUES)
        assert node.value is not None
        return f"`= {ast.unparse(node.value)}`\n\n{doc}\n"
    ours = (ast.unparse(base) for base in node.bases)
    bases = [f"`{base}`" for base in ours if base not in {"ABC", "Protocol"}]
    lines = [f"- `{shown}`: {doc}" if doc else f"- `{shown}`" for shown, _, doc in members(node)]
    head = f"({', '.join(bases)}) " if bases else ""
    return f"{head}{doc}\n" + ("\n" + "\n".join(lines) + "\n" if lines else "")


def members(cls: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Each public field and method: how it is shown, its name, and its docstring."""
    for node, after in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(node, VALUES) and not target(node).startswith("_"):
            shown, doc = attribute(node)
            yield shown, target(node), doc or text(after)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if "overload" in decorators or (node.name[0] == "_" and node.name != "__call__"):
                continue
            shown = signature(node)
            if "property" in decorators:
                shown = f"{node.name}: {ast.unparse(node.returns) if node.returns else 'None'}"
            if "abstractmethod" in decorators:
                shown = f"abstract {shown}"
            yield shown, node.name, prose(ast.get_docstring(node))


def attribute(node: ast.Assign | ast.AnnAssign) -> tuple[str, str]:
    """A field as its definition shows it, and the description that ``setting`` gives it."""
    kind = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
    value, doc = node.value, ""
    if isinstance(value, ast.Call):
        factory = next((k.value for k in value.keywords if k.arg == "factory"), None)
        name = ast.unparse(value.func)
        if name == "setting":
            doc = prose(str(ast.literal_eval(value.args[0])))
            value = value.args[1] if len(value.args) > 1 else None
        elif name in {"field", "Factory"}:
            value = value.args[0] if name == "Factory" else None
            value = ast.Call(func=value, args=[], keywords=[]) if value else None
        if factory is not None:
            empty = {"dict": "{}", "list": "[]"}.get(ast.unparse(factory))
            value = ast.parse(empty, mode="eval").body if empty else None
    default = f" = {ast.unparse(value)}" if value is not None else ""
    return f"{target(node)}{kind}{default}", doc


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    arguments = ast.unparse(node.args).removeprefix("self, ").removeprefix("self")
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    prefix = "async " if isinstance(node, ast.AsyncFunctionDef) else ""
    return f"{prefix}{node.name}({arguments}){result}"


def text(node: ast.stmt | None) -> str:
    """The docstring that a statement is; empty where it is another statement."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return prose(str(node.value.value)) if isinstance(node.value.value, str) else ""
    return ""


def prose(doc: str | None) -> str:
    """A docstring as one Markdown paragraph; an indented part stays as it is."""
    if not doc:
        return ""
    parts = inspect.cleandoc(doc).replace("``", "`").split("\n\n")
    blocks = [f"```text\n{p}\n```" if p.startswith("    ") else " ".join(p.split()) for p in parts]
    joined = "\n\n" if any(block.startswith("```") for block in blocks) else " "
    return joined.join(blocks)


def where(name: str, module: str) -> str:
    """Where plugins import ``name`` from, unless it is ``commutator``."""
    return "" if name in commutator.__all__ else f"From `commutator.{module}`. "


def written(folder: Path) -> dict[str, str]:
    """The pages that lie in ``folder``."""
    return {file.name: file.read_text() for file in folder.glob("*.md")}


def write_pages(folder: Path, pages: dict[str, str]) -> None:
    """Make ``folder`` hold these pages and no others."""
    folder.mkdir(exist_ok=True)
    for name in written(folder).keys() - pages.keys():
        (folder / name).unlink()
    for name, text in pages.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write_pages(FOLDER, pages())
