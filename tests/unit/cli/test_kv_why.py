"""What `commutator kv why` tells a person."""

from __future__ import annotations

import pytest

from commutator.contract.worker import BlockExplanation, HeldBlock, PromptExplanation
from commutator_console.kv import show_why


def told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tokens: int, blocks: int
) -> str:
    monkeypatch.setenv("COLUMNS", "200")
    held = (HeldBlock(name="dram", state="published"),)
    block = BlockExplanation(key="ab", held=held, reusable=True, tier="dram", reason="in dram")
    answer = PromptExplanation(prompt_tokens=tokens, block_size=16, blocks=(block,) * blocks)
    show_why({"reference-0": answer})
    return capsys.readouterr().out


def test_a_prompt_shorter_than_a_block(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(capsys, monkeypatch, 1, 0) == (
        "reference-0: 1 token. Nothing can be reused: blocks are reused whole, a block has "
        "16 tokens, and the last token is always computed, so a prompt must have at least "
        "17 tokens\n"
    )


@pytest.mark.parametrize(
    ("tokens", "blocks", "words"),
    [
        (17, 1, "17 tokens, 1 of 1 block would be reused; the last token is always computed"),
        (48, 2, "48 tokens, 2 of 2 blocks would be reused; the last 16 tokens are always computed"),
    ],
)
def test_what_is_reused_and_what_never(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tokens: int,
    blocks: int,
    words: str,
) -> None:
    first, heading, row = told(capsys, monkeypatch, tokens, blocks).splitlines()
    assert first == f"reference-0: {words}"
    assert heading.split()[0] == "blocks"
    assert row.split()[1:] == ["yes", "in", "dram", "dram"]
