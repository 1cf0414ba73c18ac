"""Writes ``docs/reference/models.md``: what models keep as KV, and what engines do with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from commutator_engine_kit.model_kv import SUPPORT_NAMES, KvSupport
from commutator_models.families import Family, families
from commutator_models.models import engine_supports, sizes_row

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "models.md"
ENGINES = ("reference", "vllm", "sglang", "trtllm")
HEAD = """# Models and their KV

Generated (`make docs`) from configurations alone, as `commutator models` prints it; for a model of yours: `commutator models FOLDER`, and
`commutator config check` for the engines of a deployment. Sizes are those that transformers' configuration classes have by default, which are not
those of every model of a family; numbers in bfloat16, states in float32 unless the configuration says another format. `?` means that the
configuration does not say it, or that no code here knows what it says; then no sum is given.

*Bytes a token*: what each further token of a long prompt adds. *Windows*: what sliding and chunked layers hold at most. *A state*: of all recurrent
layers together; one is kept at each place where a prompt can be resumed. Draft layers count only where an engine drafts with them.

"""
MIDDLE = """
## What engines do

*yes*: shown by a test of that family. *part*: with the limit that the note says. *untried*: nothing here forbids it, and no test
has shown it. Blocks in tiers and hand-overs are verified in any case: what is not supported is computed, or refused before the start.

"""


def page() -> str:
    known = list(families())
    return HEAD + "\n".join([*_sizes(known), MIDDLE, *_supports(known), ""])


def _sizes(known: list[Family]) -> Iterator[str]:
    yield "| family | layers | bytes a token | windows | a state | context | source |"
    yield "|---|---|---|---|---|---|---|"
    sources = _Notes()
    for family in known:
        row = [*sizes_row(family.title, family.model), sources.number(family.source)]
        yield f"| {' | '.join(row)} |"
    yield from sources.lines("Sources")
    yield "\nNot known:\n"
    for family in known:
        if unknown := family.model.unknown:
            yield f"- {family.title}: {'; '.join(unknown)}"


def _supports(known: list[Family]) -> Iterator[str]:
    connectors = engine_supports()
    notes = _Notes()
    for engine in ENGINES:
        titles = " | ".join("hand-over" if each == "handover" else each for each in SUPPORT_NAMES)
        yield f"### {engine}\n\n| families | {titles} |\n|---|{'---|' * len(SUPPORT_NAMES)}"
        alike: dict[KvSupport, list[str]] = {}
        for family in known:
            support = connectors[engine].kv_support(family.model)
            alike.setdefault(support, []).append(family.title)
        for support, titles_alike in alike.items():
            cells = []
            for each in SUPPORT_NAMES:
                verdict = getattr(support, each)
                note = f" {notes.number(verdict.why)}" if verdict.why else ""
                cells.append(f"{verdict.word}{note}")
            yield f"| {', '.join(titles_alike)} | {' | '.join(cells)} |"
        yield ""
    yield from notes.lines("Notes")


class _Notes:
    """Numbers for texts that occur often."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> str:
        return f"({self._numbers.setdefault(text, len(self._numbers) + 1)})"

    def lines(self, title: str) -> Iterator[str]:
        yield f"\n{title}:\n"
        for text, number in self._numbers.items():
            yield f"{number}. {text}"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
