"""What MkDocs does not do by itself: patterns in the navigation, links into the repository."""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.commutator")

_LINK = re.compile(r"\[(?P<text>[^\]\n]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_BLOCK = re.compile(r"^(```.*?^```|~~~.*?^~~~)$", re.MULTILINE | re.DOTALL)
_PAGES = "/*"


def on_config(config: Any) -> Any:
    """Entries ``FOLDER/*`` of the navigation become the pages of the folder, sorted by name."""
    config["nav"] = expanded(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links to files beside the docs become the file's path: the site has only pages."""
    docs = Path(config["docs_dir"])
    return with_paths(markdown, Path(page.file.src_uri), docs)


def expanded(nav: Any, docs: Path) -> Any:
    """``nav`` with its patterns replaced."""
    if isinstance(nav, list):
        return [expanded(entry, docs) for entry in nav]
    if isinstance(nav, dict):
        return {title: expanded(entry, docs) for title, entry in nav.items()}
    if not nav.endswith(_PAGES):
        return nav
    pages = sorted((docs / nav.removesuffix(_PAGES)).rglob("*.md"))
    return [page.relative_to(docs).as_posix() for page in pages]


def with_paths(markdown: str, page: Path, docs: Path) -> str:
    """``markdown`` of ``page``, a path below ``docs``; what it links to has to be there."""
    root = docs.parent

    def linked(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        file = Path(os.path.normpath(docs / page.parent / target))
        if file.suffix == ".md" and file.is_relative_to(docs):
            return match[0]  # MkDocs checks those
        if file.suffix in {".svg", ".png"}:
            return match[0]
        if not file.exists():
            log.warning("%s links to %s, which is not in the repository", page, target)
            return match[0]
        if file.is_dir() and file.is_relative_to(docs) and (file / "README.md").exists():
            return f"[{match['text']}]({target.rstrip('/')}/README.md)"
        path = file.relative_to(root).as_posix()
        text = match["text"]
        return text if path in text else f"{text} (`{path}`)"

    parts = _BLOCK.split(markdown)
    return "".join(part if _BLOCK.match(part) else _LINK.sub(linked, part) for part in parts)
