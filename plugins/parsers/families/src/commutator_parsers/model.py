"""The parser of one model: the family of its calls, and how it thinks."""

from __future__ import annotations

from commutator.contract.conversation import Conversation
from commutator.contract.parser import AnswerParser, ForcedCalls, Parser, ParserConfig, ParserModel
from commutator.contract.request import Constraint
from commutator.errors import RequestError
from commutator_parsers.channels import ElementParser, HarmonyParser
from commutator_parsers.families import FAMILIES, REASONING, detect, detect_reasoning
from commutator_parsers.forced import (
    calls_or,
    forced_choice,
    forced_opening,
    form_of_calls,
    in_prompt,
    in_thoughts,
    special_marks,
    where_it_calls,
)
from commutator_parsers.parser import FamilyParser, Thinking
from commutator_parsers.texts import NoWordsError

_ELEMENTS = ("think", "response", "tools")


class ModelParser(Parser):
    """Makes what reads the answers of one model."""

    def __init__(self, config: ParserConfig, model: ParserModel) -> None:
        """Raises ValueError for a reasoning that it does not know."""
        template = model.chat_template or ""
        name = detect(template) if config.kind == "auto" else config.kind
        self.family = FAMILIES.get(name or "")
        self._name = name
        self._template = template
        self.reads_calls = self.family is not None
        self._form = form_of_calls(self.family, template)
        self._specials = model.special_tokens
        self._thinking = self._thinking_of(model.reasoning, template)

    def _thinking_of(self, reasoning: str, template: str) -> Thinking | None:
        if reasoning == "none":
            return None
        if reasoning != "auto":
            if reasoning not in REASONING:
                names = ", ".join(sorted(REASONING))
                raise ValueError(
                    f"reasoning_parser: there is none named {reasoning!r}; choose auto, none, "
                    f"{names}"
                )
            return REASONING[reasoning]
        name = detect_reasoning(template)
        return None if name is None else REASONING[name]

    def answer(self, conversation: Conversation | None, prompt_end: str) -> AnswerParser | None:
        """As of ``Parser``."""
        tools = conversation is not None and bool(conversation.tools)
        if conversation is not None and conversation.tool_choice is not None:
            tools = tools and conversation.tool_choice.mode != "none"
        asked = conversation if tools else None
        family = self.family
        if family is not None and family.whole == "harmony":
            return (
                None if conversation is None else HarmonyParser(asked, family.ids, self._specials)
            )
        if family is not None and family.whole == "elements":
            if conversation is None:
                return None
            opened = (name for name in _ELEMENTS if prompt_end.endswith(f"<|open|>{name}<|sep|>"))
            return ElementParser(asked, family.ids, self._specials, next(opened, None))
        thinking = self._thinking
        begins = (
            None if conversation is None else _begins_thinking(thinking, conversation, prompt_end)
        )
        grammar = family.grammar if family is not None and tools else None
        silent = () if family is None else family.silent
        if conversation is None or not (thinking or grammar or silent):
            return None
        ids = "call" if family is None else family.ids
        made = FamilyParser(thinking, grammar, silent, ids, asked, begins, self._specials)
        if begins is None and self._form is not None and forced_choice(asked) is not None:
            opening = forced_opening(self._form, self._template)
            made.feed(opening, special_marks(opening, self._specials))
        return made

    def forced(self, conversation: Conversation, prompt_end: str) -> ForcedCalls:
        """As of ``Parser``."""
        form = self._form
        if form is None:
            raise RequestError(
                f"tool_choice: models of the family {self._name} write calls in a form of their "
                'own, and cannot be made to write them; use "auto"',
                "tool_choice",
                "unsupported_parameter",
            )
        opening = forced_opening(form, self._template)
        thinks = _begins_thinking(self._thinking, conversation, prompt_end) is not None
        ask = in_thoughts if thinks else in_prompt
        return ask(form, opening, conversation, self._specials)

    def strict(self, conversation: Conversation, answer: Constraint | None) -> Constraint:
        """As of ``Parser``."""
        form = self._form
        if answer is not None:
            return calls_or(answer, form, conversation)
        if form is None:
            raise RequestError(
                f"tools: strict: models of the family {self._name} write calls in a form of their "
                "own, and cannot be held to schemas; leave strict out",
                "tools",
                "unsupported_parameter",
            )
        try:
            return where_it_calls(form, conversation, self._specials)
        except NoWordsError as refused:
            raise RequestError(
                f"tools: strict: {refused.why}; leave strict out", "tools", "unsupported_parameter"
            ) from refused


def _begins_thinking(
    thinking: Thinking | None, conversation: Conversation, prompt_end: str
) -> str | None:
    """The marker of reasoning that the prompt has begun, if it has."""
    if thinking is None:
        return None
    end = prompt_end.rstrip()
    for begin, stop in thinking.pairs:
        if end.endswith(begin):
            return begin
        if conversation.continue_final_message and end.rfind(begin) > end.rfind(stop):
            return begin
        if end.endswith(stop):
            return None
    return thinking.pairs[0][0] if thinking.begun else None
