"""What engines can do beyond what every request asks: operations, constraints, own options."""

from __future__ import annotations

import math
from typing import Any, Final

from attrs import frozen

__all__ = ["Operation", "OptionType", "RequestOption"]


class Operation:
    """Names of what an engine can be asked; ``EngineInfo.operations`` has those of an engine.

    The registry is open: an engine may name others, and who does not know a name does not ask.
    """

    GENERATE: Final = "generate"
    """Answer a ``GenerateRequest`` with tokens."""
    EMBED: Final = "embed"
    """Turn an input into a vector."""
    TOKEN_EMBED: Final = "token_embed"  # noqa: S105 - a token of text
    """Turn each token of an input into a vector."""
    SCORE: Final = "score"
    """Judge how well two texts fit: one number for each pair."""
    CLASSIFY: Final = "classify"
    """Give each class of an input, or of a pair, a probability."""


class OptionType:
    """Names of the types of a ``RequestOption``, in JSON's words."""

    BOOLEAN: Final = "boolean"
    """True or false."""
    INTEGER: Final = "integer"
    """A whole number."""
    NUMBER: Final = "number"
    """A finite number, whole or not."""
    STRING: Final = "string"
    """A text."""
    INTEGERS: Final = "integers"
    """A list of integers."""
    STRINGS: Final = "strings"
    """A list of strings."""


@frozen(kw_only=True)
class RequestOption:
    """One parameter of requests that only some engines have; see ``GenerateRequest.options``."""

    type: str
    """One of ``OptionType``."""
    description: str = ""
    """For people: what it does, with its unit."""
    minimum: float | None = None
    """Least value of a number, or of each in a list; None: no limit."""
    maximum: float | None = None
    """Largest value of a number, or of each in a list; None: no limit."""
    choices: tuple[str, ...] = ()
    """The legal strings; empty: any."""
    most: int = 1024
    """Most characters of a string, and of each in a list; most items of a list."""

    def problem(self, value: Any) -> str | None:
        """Why ``value`` is not legal, as what was expected; None: it is."""
        match self.type:
            case OptionType.BOOLEAN:
                return None if isinstance(value, bool) else "expected true or false"
            case OptionType.INTEGER | OptionType.NUMBER | OptionType.STRING:
                return self._problem(self.type, value)
            case OptionType.INTEGERS | OptionType.STRINGS:
                if not isinstance(value, list | tuple):
                    return f"expected a list of {self.type}"
                if len(value) > self.most:
                    return f"expected at most {self.most} of them, got {len(value)}"
                found = (self._problem(self.type.removesuffix("s"), item) for item in value)
                return next((problem for problem in found if problem is not None), None)
        return f"its type {self.type!r} is not known here"

    def _problem(self, kind: str, value: Any) -> str | None:
        if kind == OptionType.STRING:
            if not isinstance(value, str):
                return "expected a string"
            if self.choices and value not in self.choices:
                return f"expected one of {', '.join(self.choices)}"
            return None if len(value) <= self.most else f"expected at most {self.most} characters"
        whole = kind == OptionType.INTEGER
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            return f"expected {'an integer' if whole else 'a number'}"
        if not math.isfinite(value):
            return "expected a finite number"
        if self.minimum is not None and value < self.minimum:
            return f"expected at least {self.minimum:g}"
        if self.maximum is not None and value > self.maximum:
            return f"expected at most {self.maximum:g}"
        return None
