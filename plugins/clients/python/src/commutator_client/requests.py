"""What is sent for each call, and what its answer says. Pure."""

from __future__ import annotations

import json
import struct
from base64 import b64decode
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator_client.errors import ApiError, ClientConnectionError, UnavailableError
from commutator_client.results import Classification, Ranked

DEFAULT = "default"
"""The model that the configuration names, or the only one that is served."""
EMBEDDED_TOGETHER = 2_048
"""Texts of one request; more are sent in several."""
NO_HEALTH = frozenset({401, 403, 404})
"""Answers of /health to a key that may not know, and of a door that does not tell it."""
_FLOAT_BYTES = 4
_TRUNCATED = "x-commutator-truncated"
_LAST_EVENTS = frozenset({"response.completed", "response.incomplete", "response.failed"})


def with_model(body: Mapping[str, Any], model: str, default: str | None) -> dict[str, Any]:
    """``body`` without what is None, for ``model``; ``default`` is what "default" means."""
    named = default if model == DEFAULT else model
    return {
        **({} if named is None else {"model": named}),
        **{name: value for name, value in body.items() if value is not None},
    }


def chat_body(
    messages: Sequence[Mapping[str, Any]],
    max_tokens: int | None,
    temperature: float | None,
    stream: bool,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """Of POST /v1/chat/completions. ``options`` are fields of the body."""
    return {
        "messages": [*messages],
        "max_tokens": max_tokens,
        "temperature": temperature,
        "stream": stream or None,
        **options,
    }


def response_body(
    given: str | Sequence[Mapping[str, Any]], stream: bool, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Of POST /v1/responses."""
    return {
        "input": given if isinstance(given, str) else [*given],
        "stream": stream or None,
        **options,
    }


def embedding_bodies(
    texts: Sequence[str] | Sequence[Sequence[int]], dimensions: int | None, truncate: bool
) -> Iterator[dict[str, Any]]:
    """Of each POST /v1/embeddings that ``texts`` need. Raises ValueError without any."""
    if not texts:
        raise ValueError("texts: expected at least one")
    for at in range(0, len(texts), EMBEDDED_TOGETHER):
        yield {
            "input": [*texts[at : at + EMBEDDED_TOGETHER]],
            "encoding_format": "base64",
            "dimensions": dimensions,
            "truncate_prompt_tokens": -1 if truncate else None,
        }


def rerank_body(query: str, documents: Sequence[str], top_n: int | None) -> dict[str, Any]:
    """Of POST /v1/rerank; the answer need not repeat the documents."""
    return {
        "query": query,
        "documents": [*documents],
        "top_n": top_n,
        "return_documents": False,
    }


def score_body(text: str | Sequence[str], others: Sequence[str]) -> dict[str, Any]:
    """Of POST /v1/score."""
    return {"text_1": text if isinstance(text, str) else [*text], "text_2": [*others]}


def vectors(answer: Mapping[str, Any]) -> list[list[float]]:
    """The vectors of an answer, in the order of the texts."""
    rows = [b64decode(one["embedding"]) for one in sorted(answer["data"], key=_index)]
    return [[*struct.unpack(f"<{len(row) // _FLOAT_BYTES}f", row)] for row in rows]


def truncated(headers: Mapping[str, str]) -> int:
    """How many texts the deployment cut."""
    return int(headers.get(_TRUNCATED, 0))


def ranking(answer: Mapping[str, Any], documents: Sequence[str]) -> list[Ranked]:
    """Best first."""
    return [
        Ranked(one["index"], one["relevance_score"], documents[one["index"]])
        for one in answer["results"]
    ]


def scores(answer: Mapping[str, Any]) -> list[float]:
    """Of each pair of texts."""
    return [one["score"] for one in sorted(answer["data"], key=_index)]


def classifications(answer: Mapping[str, Any]) -> list[Classification]:
    """Of each text."""
    return [
        Classification(one["label"], one["probs"]) for one in sorted(answer["data"], key=_index)
    ]


def unready(error: ApiError) -> dict[str, Any]:
    """The health of a deployment whose /ready answered 503. Raises any other ``error``."""
    if not isinstance(error, UnavailableError):
        raise error
    return {"status": "degraded", "problems": [str(error)]}


def _index(one: Mapping[str, Any]) -> int:
    index: int = one["index"]
    return index


class Progress:
    """Whether a stream has come to its end."""

    def __init__(self, attempts: int = 1) -> None:
        """``attempts`` were made until it began."""
        self._attempts = attempts
        self._open: set[int] = set()
        self._ended = False

    def saw(self, piece: Mapping[str, Any]) -> None:
        """Note a chunk of a chat or an event of a response. Raises ApiError for an error."""
        if piece.get("type") == "error":
            message, code = str(piece.get("message")), piece.get("code")
            raise ApiError(200, json.dumps(piece), message, attempts=self._attempts, code=code)
        if piece.get("type") in _LAST_EVENTS:
            self._ended = True
        for choice in piece.get("choices") or ():
            if choice.get("finish_reason") is None:
                self._open.add(choice["index"])
            else:
                self._open.discard(choice["index"])
                self._ended = True

    def end(self) -> None:
        """Raises ClientConnectionError where the answer is not complete.

        A proxy may close a connection as if all was sent.
        """
        if self._open or not self._ended:
            raise ClientConnectionError(
                "the answer broke off: the connection was closed before the last piece",
                self._attempts,
            )
