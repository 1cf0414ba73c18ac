"""Writes ``docs/reference/engines.md`` from the tests that prove it: those marked ``proves``.

The test files are read, not imported: that needs no engine. A mark has constants only:
``@pytest.mark.proves("vllm", "prefill and decode apart", how="real engine on CPU")``.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import install_sglang
import install_vllm

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "engines.md"

ENGINES = {
    "reference": "reference",
    "vllm": f"vLLM {install_vllm.VERSION}",
    "sglang": f"SGLang {install_sglang.VERSION}",
    "trtllm": "TensorRT-LLM, as published in 2026",
}
HOW = ("real engine on CPU", "real engine on GPU", "stand-in")
FEATURES = (
    "engine conformance suite",
    "chat and completions, whole and streamed",
    "the right greedy tokens",
    "JSON schemas and tool calls",
    "routing by prefix finds what can be found",
    "KV events: the index is what the server holds",
    "a worker killed: its answers go on elsewhere",
    "a worker drained: nothing fails",
    "prefill and decode apart: the right tokens",
    "prefill and decode apart: one side killed",
    "KV tiers: loaded blocks, the right tokens",
    "KV tiers with prefill and decode apart",
    "several engines behind one front door",
)
HEAD = """# What works with which engine

Generated from the tests that prove it (`make docs`): each word leads to one. *CPU* and *GPU*: against the real engine in that version, on such
a machine. *Stand-in*: against a program of ours that offers the engine's published interfaces; **a real TensorRT-LLM
has never been run**. Empty cells are untested. The engine `sim` is no model, and has no column.

"""
TAIL = """
Other versions of vLLM and SGLang may work: `make test-vllm` and `make test-sglang` tell, in an environment that has them.
"""


class Proof(NamedTuple):
    engine: str
    feature: str
    how: str
    path: Path


def proofs() -> list[Proof]:
    """Every mark in every test file. Raises ValueError for one with unknown words."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text()
        if "mark.proves(" in source:
            calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
            found += [_proof(call, path) for call in calls if _is_mark(call.func)]
    return found


def _is_mark(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "proves"


def _proof(call: ast.Call, path: Path) -> Proof:
    where = f"{path.relative_to(ROOT)}:{call.lineno}"
    words = {keyword.arg: keyword.value for keyword in call.keywords}
    if len(call.args) != 2 or words.keys() != {"how"}:  # noqa: PLR2004
        raise ValueError(f"{where}: expected proves(ENGINE, FEATURE, how=HOW)")
    engine, feature, how = map(ast.literal_eval, (*call.args, words["how"]))
    for word, known in ((engine, ENGINES), (feature, FEATURES), (how, HOW)):
        if word not in known:
            raise ValueError(f"{where}: {word!r} is none of {', '.join(known)}")
    return Proof(engine, feature, how, path)


def page() -> str:
    places: dict[tuple[str, str], dict[str, Path]] = defaultdict(dict)
    for proof in proofs():
        places[proof.feature, proof.engine].setdefault(proof.how, proof.path)
    lines = [f"| | {' | '.join(ENGINES.values())} |", "|---" * (len(ENGINES) + 1) + "|"]
    for feature in FEATURES:
        cells = [_cell(places[feature, engine]) for engine in ENGINES]
        lines.append(f"| {feature} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n" + TAIL


def _cell(by_how: dict[str, Path]) -> str:
    return ", ".join(
        f"[{how.removeprefix('real engine on ')}](../../{by_how[how].relative_to(ROOT)})"
        for how in HOW
        if how in by_how
    )


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
