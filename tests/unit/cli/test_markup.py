"""What models and workers say is printed as it is, not taken for Rich's markup."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from commutator.contract.worker import (
    BlockExplanation,
    HeldBlock,
    PromptExplanation,
    TierVerification,
)
from commutator_console.kv import show_verified, show_why
from commutator_scaffold.demo import Answer, print_answer, summary

ODD = "[/INST] [red]x"


def test_the_demo_prints_any_answer() -> None:
    console = Console(file=StringIO(), width=200)
    answer = Answer(worker="w-0", reason=f"why {ODD}", text=f"{ODD} :rocket:\n", generated_tokens=1)
    print_answer(console, answer)
    console.print(summary([("ann", answer)]))
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert f"     {ODD} :rocket:" in printed
    assert f"w-0: why {ODD}" in printed
    assert "first token after 0 ms, then" in printed


def test_a_worker_may_say_anything(capsys: pytest.CaptureFixture[str]) -> None:
    check = TierVerification(
        tier="nvme",
        blocks=2,
        intact=0,
        corrupt=2,
        gone=0,
        unreadable=0,
        bytes=0,
        seconds=0.0,
        problem=f"at {ODD}",
    )
    show_verified({"w-0": [check]})
    held = (HeldBlock(name=ODD, state="published"),)
    block = BlockExplanation(key="ab", held=held, reusable=False, tier=None, reason=ODD)
    show_why({"w-0": PromptExplanation(prompt_tokens=17, block_size=16, blocks=(block,))})
    printed = capsys.readouterr().out
    assert printed.count(ODD) == 3
