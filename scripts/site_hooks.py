"""What MkDocs does not do by itself: patterns in the navigation, links to files, diagrams."""

from __future__ import annotations

import html
import logging
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from merman import Merman, MermanError

from commutator_console.page import write_player

log = logging.getLogger("mkdocs.commutator")

_LINK = re.compile(r"\[(?P<text>[^\]\n]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_BLOCK = re.compile(r"^(```.*?^```|~~~.*?^~~~)$", re.MULTILINE | re.DOTALL)
_PAGES = "/*"
_DIAGRAM = re.compile(r'<pre class="mermaid"><code>(.*?)</code></pre>', re.DOTALL)
_PLAYER = "live"
"""The folder of the site with the page that plays ``RECORDING``."""
RECORDING = "minute.json.gz"
_LIVE = re.compile(r'<img [^>]*src="(?P<up>(?:\.\./)*)pictures/live-light\.png"[^>]*>')
_THEMES = {"light": "default", "dark": "dark"}
"""Mermaid's themes for the palettes of the site."""
_OWN_ID = "merman"
"""What the renderer calls each picture, in its ids and its styles."""


def on_config(config: Any) -> Any:
    """Entries ``FOLDER/*`` of the navigation become the pages of the folder, sorted by name."""
    config["nav"] = expanded(config["nav"], Path(config["docs_dir"]))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Links to files beside the docs become the file's path: the site has only pages."""
    docs = Path(config["docs_dir"])
    return with_paths(markdown, Path(page.file.src_uri), docs)


def on_page_content(content: str, *, page: Any, config: Any, **_: Any) -> str:
    """Mermaid diagrams become SVG, so that browsers load no script for them from elsewhere.

    Other words for what a page is about are there for the search alone.
    """
    words = aliases(Path(config["docs_dir"])).get(page.file.src_uri, ())
    return with_diagrams(with_player(with_words(content, words)), page.file.src_uri)


def on_post_build(config: Any) -> None:
    """The page at /ui stands beside the docs, and plays a recorded minute."""
    write_player(Path(config["site_dir"]) / _PLAYER, f"../pictures/{RECORDING}")


def with_player(content: str) -> str:
    """HTML whose pictures of the live page lead to the one that plays the recording."""
    return _LIVE.sub(
        rf'<a href="\g<up>{_PLAYER}/" title="Play a recorded minute">\g<0></a>'
        rf'<br><a href="\g<up>{_PLAYER}/">Play a recorded minute of it</a>',
        content,
    )


@cache
def aliases(docs: Path) -> dict[str, list[str]]:
    """What people call what a page is about, by page."""
    found: dict[str, list[str]] = yaml.safe_load((docs / "aliases.yml").read_text())
    for page in found:
        if not (docs / page).is_file():
            log.warning("aliases.yml names %s, which is no page", page)
    return found


def with_words(content: str, words: Sequence[str]) -> str:
    """HTML with ``words`` behind its title, for the search index and not for readers."""
    if not words:
        return content
    hidden = f'<p hidden class="aliases">{html.escape(", ".join(words))}</p>'
    title, end, rest = content.partition("</h1>")
    return f"{title}{end}{hidden}{rest}" if end else f"{hidden}{content}"


def with_diagrams(content: str, page: str) -> str:
    """The HTML of ``page`` with its diagrams drawn for each palette; one is shown at a time."""
    number = 0

    def drawn(match: re.Match[str]) -> str:
        nonlocal number
        number += 1
        source = html.unescape(match[1])
        try:
            pictures = [
                f'<div class="{palette}">{_svg(source, theme, f"diagram-{number}-{palette}")}</div>'
                for palette, theme in _THEMES.items()
            ]
        except MermanError as error:
            log.warning("%s: its diagram %d cannot be drawn: %s", page, number, error)
            return match[0]
        return f'<div class="diagram">{"".join(pictures)}</div>'

    return _DIAGRAM.sub(drawn, content)


def _svg(source: str, theme: str, name: str) -> str:
    svg: str = _renderer().render_svg(f'%%{{init: {{"theme": "{theme}"}}}}%%\n{source}', None)
    return svg.replace(_OWN_ID, name)  # ids must differ within a page


@cache
def _renderer() -> Merman:
    return Merman()


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
