"""Parsers: from what a model writes to events, by the family of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from attrs import frozen

from commutator.contract.answer import AnswerEvent, FinishKind
from commutator.contract.conversation import Conversation
from commutator.contract.request import Constraint
from commutator.contract.settings import setting
from commutator.errors import RequestError

__all__ = ["AnswerParser", "ForcedCalls", "Parser", "ParserConfig", "ParserModel"]


@frozen(kw_only=True)
class ParserConfig:
    """Options of a parser."""

    kind: str = setting("The parser plugin: the family whose markers the model writes.")


@frozen(kw_only=True)
class ParserModel:
    """The model whose answers a parser reads."""

    name: str
    """As clients name it."""
    chat_template: str | None
    """The text of its chat template; None: it has none."""
    special_tokens: Mapping[str, int]
    """The texts of its vocabulary's special tokens, and their ids."""
    reasoning: str
    """How its reasoning is read, from the option `reasoning_parser`: "auto", "none", or a name that
    the parser knows."""


@frozen(kw_only=True)
class ForcedCalls:
    """How an answer is made to be calls of tools."""

    opening: str
    """What the model would write before the calls, put at the prompt's end. Empty: nothing, or
    ``constraint`` has it because the answer begins with thoughts."""
    constraint: Constraint
    """What the answer has to follow from there on, or after its thoughts."""


class AnswerParser(ABC):
    """Reads one answer.

    It is fed what the detokenizer yields, never half a character, special tokens included. However
    its input is cut, the events say the same. Called in the event loop: some microseconds a token
    at most.
    """

    thinks_until: str | None = None
    """What ends the thoughts in which the answer begins; None: it begins otherwise. What an answer
    must follow begins after it."""

    @abstractmethod
    def feed(self, text: str, tokens: Sequence[tuple[int, int]] = ()) -> Sequence[AnswerEvent]:
        """The events that ``text`` completes: ``Content``, ``ReasoningContent`` and calls.

        ``tokens`` are the special tokens in ``text``, each whole, as (offset, length): where a
        marker is a special token, the same characters elsewhere are text.
        """

    @abstractmethod
    def finish(self, reason: FinishKind) -> tuple[Sequence[AnswerEvent], FinishKind]:
        """The events that were held back, and why the answer really ended.

        "stop" after calls is "tool_calls".
        """


class Parser(ABC):
    """Reads the answers of one model. Made once for each front-door process."""

    reads_calls: bool
    """Whether it knows how the model writes calls of tools."""

    @abstractmethod
    def answer(self, conversation: Conversation | None, prompt_end: str) -> AnswerParser | None:
        """What reads one answer; None: there is nothing to look for, the answer is text.

        Calls are looked for where ``conversation`` has tools and does not forbid them.
        ``prompt_end`` are the last characters of the rendered prompt, in which the template may
        have begun reasoning. ``conversation`` is None for a plain prompt. Where its tool choice is
        "required" or "named", the answer begins behind ``ForcedCalls.opening``, which is no part of
        ``prompt_end``.
        """

    def forced(self, conversation: Conversation, prompt_end: str) -> ForcedCalls:
        """How the model is made to call what the conversation's tool choice says.

        It is "required" or "named". Arguments as of ``answer``. Raises RequestError where the
        parser does not know how, as by default.
        """
        raise RequestError(
            'tool_choice: the parser of this model cannot make it call a tool; use "auto"',
            "tool_choice",
            "unsupported_parameter",
        )

    def strict(self, conversation: Conversation, answer: Constraint | None) -> Constraint:
        """What an answer follows in which the model may call, so that calls of strict tools fit.

        Without calls it follows ``answer``; None: it is text. By default there are no calls then.
        It comes after reasoning, where the answer begins in it. Raises RequestError as ``forced``.
        """
        if answer is not None:
            return answer
        problem = "tools: strict: this model's parser cannot hold calls to schemas; leave it out"
        raise RequestError(problem, "tools", "unsupported_parameter")
