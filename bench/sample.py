"""A few streaming chats, read to their end: what a load generator counts but does not look at."""

from __future__ import annotations

import json
import random
import urllib.request

from bench.wrk import VOCABULARY

__all__ = ["cached_share"]

PREFIXES = 16
ROUNDS = 3


def cached_share(url: str, model: str, *, words: int, tokens: int) -> float:
    """The part of prompt tokens that came from KV caches, when every prefix has been seen before.

    Raises RuntimeError when an answer is incomplete.
    """
    chance = random.Random(words)
    vocabulary = VOCABULARY.split()
    prefixes = [" ".join(chance.choices(vocabulary, k=words - 4)) for _ in range(PREFIXES)]
    prompt_tokens = cached_tokens = 0
    for number in range(ROUNDS):
        for prefix in prefixes:
            question = " ".join(chance.choices(vocabulary, k=4))
            prompt, cached = _chat(url, model, f"{prefix} {question}", tokens)
            if number:
                prompt_tokens += prompt
                cached_tokens += cached
    return cached_tokens / prompt_tokens


def _chat(url: str, model: str, text: str, tokens: int) -> tuple[int, int]:
    """(prompt tokens, of these cached) of one chat whose answer was seen to be whole."""
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
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    if usage["completion_tokens"] != tokens:
        raise RuntimeError(f"asked for {tokens} tokens, got {usage['completion_tokens']}")
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens") or 0
