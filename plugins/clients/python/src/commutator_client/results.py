"""What a client returns where it is not what the server sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors, in the order of the texts."""

    vectors: list[list[float]]
    prompt_tokens: int
    truncated: int
    """How many texts were cut."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in a ranking."""

    index: int
    """Its place among the documents that were sent."""
    score: float
    document: str


@dataclass(frozen=True, slots=True)
class Classification:
    """The class of a text."""

    label: str | None
    """The likeliest class; None where the model does not name them."""
    probabilities: list[float]


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in which tools were called."""

    answer: dict[str, Any]
    """The last completion, which calls nothing."""
    messages: list[dict[str, Any]]
    """All messages, those of the tools and the answer's included."""

    @property
    def text(self) -> str:
        """What the model said at last."""
        return str(self.messages[-1]["content"])
