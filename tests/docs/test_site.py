"""The docs as a site: it builds strictly, and what our hooks do to navigation and links."""

from __future__ import annotations

import gzip
import html
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import site_hooks  # noqa: E402 - it lies in scripts/

DOCS = ROOT / "docs"
PAGE = Path("how-to/tiers.md")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in DOCS.rglob("*.md"):
        below = page.relative_to(DOCS).with_suffix("")
        built = below.parent if below.name in {"index", "README"} else below
        assert (tmp_path / "site" / built / "index.html").is_file(), page
    home = (tmp_path / "site" / "index.html").read_text()
    assert home.count('<a href="live/"') == 2, "the picture, and the words below it"
    watch = (tmp_path / "site" / "how-to" / "watch" / "index.html").read_text()
    assert '<a href="../../live/"' in watch
    player = (tmp_path / "site" / "live" / "index.html").read_text()
    (recording,) = re.findall(r'data-recording="(.*?)"', player)
    minute = json.loads(gzip.decompress((tmp_path / "site" / "live" / recording).read_bytes()))
    assert len(minute["snapshots"]) > 30
    for kind in ("Tutorials", "How to", "Reference", "Explanation"):
        assert kind in home
    for built_page in (tmp_path / "site").rglob("*.html"):
        text = built_page.read_text()
        assert 'class="mermaid"' not in text, f"{built_page}: a browser would fetch a script"
        fetched = re.findall(r'<(?:script|img|source)[^>]+src="(.*?)"', text)
        fetched += re.findall(r'<link rel="(?:stylesheet|icon|preload)"[^>]*href="(.*?)"', text)
        assert [one for one in fetched if "://" in one or one.startswith("//")] == [], built_page
    architecture = (tmp_path / "site/explanation/architecture/index.html").read_text()
    assert architecture.count('<svg id="diagram-1-') == 2
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 100_000

    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())["docs"]
    for named, words in site_hooks.aliases(DOCS).items():
        place = named.removesuffix(".md") + "/"
        found = " ".join(one["text"] for one in index if one["location"].startswith(place))
        assert all(word in found for word in words), named


@pytest.mark.parametrize(
    "word", ["reload", "helm", "lora", "ollama", "fallback", "rate limit", "kubernetes", "alias"]
)
def test_the_search_knows_what_people_call_things(word: str) -> None:
    assert any(word in words for words in site_hooks.aliases(DOCS).values())


def test_words_for_the_search_stand_behind_the_title_and_are_not_shown() -> None:
    made = site_hooks.with_words("<h1>T</h1><p>x</p>", ["a & b", "c"])
    assert made == '<h1>T</h1><p hidden class="aliases">a &amp; b, c</p><p>x</p>'
    assert site_hooks.with_words("<p>x</p>", []) == "<p>x</p>"


def test_titles_of_how_to_pages_say_what_is_done() -> None:
    titles = [page.read_text().partition("\n")[0] for page in (DOCS / "how-to").glob("*.md")]
    assert not [title for title in titles if "How to" in title]


def test_every_distribution_has_its_status() -> None:
    text = (DOCS / "reference" / "status.md").read_text()
    for project in ROOT.glob("plugins/*/*/pyproject.toml"):
        name = project.parent.name
        assert f"`{name}`" in text, f"docs/reference/status.md does not name {name}"


def test_a_pattern_stands_for_the_pages_of_a_folder(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / "some").mkdir(exist_ok=True)
        (tmp_path / "some" / f"{name}.md").write_text("# Page\n")
    nav = [{"Home": "index.md"}, {"All": [{"Some": "some/*"}]}]
    assert site_hooks.expanded(nav, tmp_path) == [
        {"Home": "index.md"},
        {"All": [{"Some": ["some/a.md", "some/b.md"]}]},
    ]


@pytest.mark.parametrize(
    ("written", "on_the_site"),
    [
        ("[the pages](../reference/cli.md#x)", "[the pages](../reference/cli.md#x)"),
        ("[far](https://example.com/a)", "[far](https://example.com/a)"),
        ("[wheels](../../scripts/build_wheels.py)", "wheels (`scripts/build_wheels.py`)"),
        ("[`scripts/`](../../scripts)", "`scripts/`"),
        ("[a tier](../plugins/folder_tier/)", "[a tier](../plugins/folder_tier/README.md)"),
        ("```\n[code](../../scripts)\n```", "```\n[code](../../scripts)\n```"),
    ],
)
def test_links_beside_the_docs_become_paths(written: str, on_the_site: str) -> None:
    assert site_hooks.with_paths(written, PAGE, DOCS) == on_the_site


def fence(diagram: str) -> str:
    return f'<p>a</p>\n<pre class="mermaid"><code>{html.escape(diagram)}</code></pre>'


def test_a_diagram_is_drawn_for_each_palette() -> None:
    drawn = site_hooks.with_diagrams(fence("flowchart LR\n    a -->|x| b\n") * 2, "page.md")
    assert re.findall(r'<svg id="(.*?)"', drawn) == [
        "diagram-1-light", "diagram-1-dark", "diagram-2-light", "diagram-2-dark",
    ]  # fmt: skip
    assert "mermaid" not in drawn.partition("<svg")[0]


def test_a_diagram_that_cannot_be_drawn_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.commutator"):
        kept = site_hooks.with_diagrams(fence("sequenceDiagram\n    a->>b: one; two\n"), "page.md")
    assert "page.md: its diagram 1 cannot be drawn" in caplog.text
    assert "one; two" in kept


def test_a_link_to_nothing_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "mkdocs.commutator"):
        site_hooks.with_paths("[gone](../../no/such.py)", PAGE, DOCS)
    assert "how-to/tiers.md links to ../../no/such.py" in caplog.text
