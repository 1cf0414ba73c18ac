"""Writes ``docs/reference/bounds.md`` from ``bounds.toml``, and finds what its table must name.

A *site* is a function of ours that opens a socket, accepts connections, or starts a program.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_name("bounds.toml")
PAGE = ROOT / "docs" / "reference" / "bounds.md"
HEAD = """# Bounds

Generated (`make docs`): what each peer of a process can send or withhold, what ends it, and the test that shows it. A test looks for every
place in the code that opens a connection, listens or starts a program, and fails where this table has none for it. Options are in the
[reference of the configuration](configuration/index.md); bounds without one are fixed.

"""

_CALLS = {
    "asyncio": {
        "open_connection", "open_unix_connection", "start_server", "start_unix_server",
        "create_subprocess_exec", "create_subprocess_shell",
    },
    "subprocess": {"run", "Popen", "call", "check_call", "check_output", "getoutput"},
    "os": {"system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty"},
    "socket": {
        "socket", "create_server", "create_connection", "getaddrinfo", "gethostbyname",
        "gethostbyaddr", "getnameinfo", "socketpair",
    },
    "urllib.request": {"urlopen", "build_opener", "urlretrieve"},
    "http.client": {"HTTPConnection", "HTTPSConnection"},
    "aiohttp": {"ClientSession", "request"},
    "aiohttp.web": {"AppRunner", "ServerRunner", "TCPSite", "UnixSite", "SockSite", "Server", "run_app"},
    "grpc.aio": {"server", "insecure_channel", "secure_channel"},
    "grpc": {"server", "insecure_channel", "secure_channel"},
    "nats": {"connect"},
    "nats.aio.client": {"Client"},
    "boto3": {"client", "resource"},
    "boto3.session": {"Session"},
    "botocore.httpsession": {"URLLib3Session"},
    "ray": {"init"},
    "huggingface_hub": {"snapshot_download", "hf_hub_download"},
    "openai": {"OpenAI", "AsyncOpenAI"},
    "httpx": {"Client", "AsyncClient", "get", "post", "stream", "request"},
    "commutator.trust": {"connect", "listen", "serve"},
    "commutator.trust.wire": {"connect", "listen", "serve"},
    "commutator.registry.client": {"connect"},
}  # fmt: skip
_METHODS = {
    "create_connection", "create_unix_connection", "create_server", "create_unix_server",
    "create_datagram_endpoint", "connect_accepted_socket", "sock_connect", "subprocess_exec",
    "subprocess_shell", "nixl_agent",
}  # fmt: skip
"""Of an event loop, and of NIXL, whatever the object is called."""
_ALL_OF = {
    "requests", "urllib3", "websockets", "socketserver", "http.server", "multiprocessing", "smtplib",
    "ftplib", "imaplib", "poplib", "telnetlib", "xmlrpc.client", "paramiko", "redis", "pycurl",
}  # fmt: skip
"""Modules of which any use is a site."""


def sites(source: str) -> Iterator[tuple[str, str]]:
    """The sites of a module: the qualified name of each function, and what it uses."""
    tree = ast.parse(source)
    names = dict(_imported(tree))
    yield from _within(tree, names, "")


def _within(node: ast.AST, names: dict[str, str], where: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        inside = where
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inside = f"{where}.{child.name}".lstrip(".")
        if isinstance(child, ast.ClassDef):
            for base in child.bases:
                if (used := _used(base, names)) is not None:
                    yield inside, used
        if isinstance(child, ast.Call) and (used := _used(child.func, names)) is not None:
            yield where or "(module)", used
        yield from _within(child, names, inside)


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Local names of what is imported anywhere in a module, and whole ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for one in node.names:
                root = one.name.partition(".")[0]
                yield (one.asname, one.name) if one.asname else (root, root)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for one in node.names:
                yield one.asname or one.name, f"{node.module}.{one.name}"


def _used(function: ast.expr, names: dict[str, str]) -> str | None:
    """The whole name of what is called, if it makes its caller a site."""
    parts: list[str] = []
    inner = function
    while isinstance(inner, ast.Attribute):
        parts.insert(0, inner.attr)
        inner = inner.value
    if isinstance(inner, ast.Name) and inner.id in names:
        whole = ".".join([names[inner.id], *parts])
        module, _, name = whole.rpartition(".")
        if name in _CALLS.get(module, ()) or any(whole.startswith(f"{one}.") for one in _ALL_OF):
            return whole
    if not parts:
        return None
    if parts[-1] in _METHODS:
        return parts[-1]
    if parts[-1] == "socket" and len(parts) > 1 - isinstance(inner, ast.Name | ast.Call):
        made_by = parts[-2] if len(parts) > 1 else getattr(inner, "id", "")
        if "context" in made_by or made_by == "instance" or isinstance(inner, ast.Call):
            return "zmq socket"
    return None


def all_sites() -> dict[str, set[str]]:
    """Of everything that serves: ``PATH:FUNCTION``, and what is used there."""
    found: dict[str, set[str]] = {}
    for pattern in ("core/src/**/*.py", "plugins/*/*/src/**/*.py"):
        for path in sorted(ROOT.glob(pattern)):
            if "plugins/tools/testing/" in str(path):
                continue
            for function, used in sites(path.read_text()):
                found.setdefault(f"{path.relative_to(ROOT)}:{function}", set()).add(used)
    return found


def rows() -> list[dict[str, Any]]:
    """The table: each row has peer, sends, bound, then and test; options and sites are lists."""
    found: list[dict[str, Any]] = tomllib.loads(TABLE.read_text())["bound"]
    return found


def page() -> str:
    lines = ["| peer | may send, or withhold | bound | options | beyond it | test |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows():
        options = ", ".join(f"`{one}`" for one in row.get("options", []))
        cells = [row["peer"], row["sends"], row["bound"], options, row["then"], f"`{row['test']}`"]
        lines.append(f"| {' | '.join(cells)} |")
    return HEAD + "\n".join([*lines, ""])


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
