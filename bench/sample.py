"""A few streaming chats, read to their end: what a load generator counts but does not look at."""

from __future__ import annotations

import json
import urllib.request

from bench.texts import VOCABULARY

__all__ = ["check_chats"]

CHATS = 8


def check_chats(url: str, model: str, tokens: int) -> None:
    """Raises RuntimeError unless every answer has ``tokens`` tokens and a proper end."""
    words = VOCABULARY.split()
    for number in range(CHATS):
        _check_chat(url, model, " ".join(words[number:]), tokens)


def _check_chat(url: str, model: str, text: str, tokens: int) -> None:
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "stream_options": {"include_usage": True},
        "messages": [{"role": "user", "content": text}],
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = [line for line in answer.read().decode().split("\n") if line]
    if lines[-1] != "data: [DONE]":
        raise RuntimeError(f"the stream ended with {lines[-1][:200]}")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    said = "".join(
        choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
    )
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    if not said or usage["completion_tokens"] != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage['completion_tokens']}: {said!r}")
