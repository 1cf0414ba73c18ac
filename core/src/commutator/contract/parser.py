"""Parsers: from what a model writes to events, by the family of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from attrs import frozen

from commutator.contract.answer import AnswerEvent, FinishKind
from commutator.contract.conversation import Conversation
from commutator.contract.settings import setting

__all__ = ["AnswerParser", "ParserConfig"]


@frozen(kw_only=True)
class ParserConfig:
    """Options of a model's `parser`; each parser plugin adds its own."""

    kind: str = setting("The parser plugin: the family whose markers the model writes.")


class AnswerParser(ABC):
    """Reads one answer. A parser plugin's factory makes one for each answer.

    It is fed what the detokenizer yields after stop strings were looked for, never half a
    character. However its input is cut, the events say the same. Called in the event loop: some
    microseconds a token at most.
    """

    @abstractmethod
    def begin(self, conversation: Conversation | None, prompt_end: str) -> None:
        """Called first.

        ``prompt_end``: the last characters of the rendered prompt, in which the template may have
        begun reasoning. ``conversation`` is None for a plain prompt.
        """

    @abstractmethod
    def feed(self, text: str) -> Sequence[AnswerEvent]:
        """The events that ``text`` completes: ``Content``, ``ReasoningContent`` and calls."""

    @abstractmethod
    def finish(self, reason: FinishKind) -> tuple[Sequence[AnswerEvent], FinishKind]:
        """The events that were held back, and why the answer really ended.

        "stop" after calls is "tool_calls".
        """
