"""Writes ``docs/reference/python-client.md`` from the docstrings of ``commutator_client``."""

from __future__ import annotations

import ast

import contract_page as pages

PAGE = pages.ROOT / "docs" / "reference" / "python-client.md"
SOURCE = pages.ROOT / "plugins" / "clients" / "python" / "src" / "commutator_client"
MODULES = {
    "config": ["ClientConfig"],
    "aio": ["AsyncClient", "AsyncPieces"],
    "sync": ["Client", "Pieces"],
    "tools": ["Tool"],
    "results": ["Conversation", "Embeddings", "Ranked", "Classification"],
    "errors": [
        "ClientError",
        "ClientConnectionError",
        "ClientTimeoutError",
        "ApiError",
        "OverloadedError",
        "UnavailableError",
    ],
}
SAME = {"Client", "Pieces"}
"""Classes whose methods are those of the async ones."""
HEAD = """# Python client

The public names of `commutator_client`, generated from their docstrings (`make docs`); see [how to use it](../how-to/python-client.md).
"""


def page() -> str:
    parts = [HEAD]
    for module, names in MODULES.items():
        tree = ast.parse((SOURCE / f"{module}.py").read_text())
        for name in names:
            node, doc = pages.find(tree, name)
            if name in SAME:
                doc = f"{doc} Its methods are those of `Async{name}`, without `await`.\n"
                parts.append(f"## `{name}`\n\n{doc}")
            else:
                parts.append(f"## `{name}`\n\n{pages.section(node, doc)}")
                parts += _attributes(node)
    return "\n".join(parts)


def _attributes(node: ast.stmt) -> list[str]:
    """What errors tell, from the docstrings below the assignments of ``__init__``."""
    lines = []
    for method in ast.iter_child_nodes(node):
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            for one, after in zip(method.body, method.body[1:], strict=False):
                if isinstance(one, ast.Assign) and (doc := pages.text(after)):
                    lines.append(f"- `{ast.unparse(one.targets[0]).removeprefix('self.')}`: {doc}")
    return ["\n".join(lines) + "\n"] if lines else []


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
