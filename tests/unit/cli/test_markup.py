"""What models and workers say is printed as it is, not taken for Rich's markup."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from commutator.cli.demo import Answer, summary, tell
from commutator.cli.kv_tables import show_verified, show_why

ODD = "[/INST] [red]x"


def test_the_demo_prints_any_answer() -> None:
    console = Console(file=StringIO(), width=200)
    answer = Answer(worker="w-0", reason=f"why {ODD}", text=f"{ODD} :rocket:\n", generated_tokens=1)
    tell(console, answer)
    console.print(summary([("ann", answer)]))
    assert isinstance(console.file, StringIO)
    printed = console.file.getvalue()
    assert f"     {ODD} :rocket:\n" in printed
    assert f"w-0: why {ODD}" in printed
    assert "first token after 0 ms, then" in printed


def test_a_worker_may_say_anything(capsys: pytest.CaptureFixture[str]) -> None:
    check = dict.fromkeys(("blocks", "intact", "gone", "unreadable", "bytes", "seconds"), 0)
    show_verified({"w-0": [{**check, "corrupt": 2, "tier": "nvme", "problem": f"at {ODD}"}]})
    block = {"reusable": False, "reason": ODD, "held": [{"name": ODD, "state": "", "note": ""}]}
    show_why({"w-0": {"blocks": [block], "block_size": 16, "prompt_tokens": 17}})
    printed = capsys.readouterr().out
    assert printed.count(ODD) == 3
