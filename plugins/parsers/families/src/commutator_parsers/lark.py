"""Lark grammars, in llguidance's notation, of all calls that a family can write for given tools.

What is allowed is read back by the family's own parser as calls whose arguments follow the schemas.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from commutator.contract.conversation import Conversation, Tool
from commutator.errors import RequestError
from commutator_parsers.calls import json_of, types_of
from commutator_parsers.grammars import (
    Grammar,
    KeyValueCalls,
    NamedCalls,
    PythonCalls,
    TagCalls,
    TreeCalls,
)
from commutator_parsers.schemas import chosen_tools, moved, without_type
from commutator_parsers.texts import DEPTH, no_words, resolved, texts_of

_JSON_SPACE = r"\n {0,24}| ?"
"""Between parts of JSON, where nobody else bounds it."""
_PLAIN_ESCAPES = 'nrt\\"'
"""Of JSON's strings, those that Python's mean the same by."""
_SEPARATE = r"[^\s\d{\[\"\-](?s:.*)"
_WORDS = r"(?i:(true|false|null|none|nil)\s*)"
"""What begins as numbers and JSON do, or is one of these words, is not read as text."""
_NOTES = {
    *("type", "title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions", "nullable", "strict", "x-guidance"),
}
_OF_ARGUMENTS = {"properties", "required", "additionalProperties"}
_NAME = re.compile(r"[\w$@.\-]{1,256}")
_PYTHON_NAME = re.compile(r"[A-Za-z_][\w.\-]*")


@frozen(kw_only=True)
class Form:
    """How a family writes calls, as its template has it."""

    grammar: Grammar | None
    """None: harmony's."""
    opening: str = ""
    """Before the first call."""
    begin: str = ""
    """Before each call."""
    end: str = ""
    """After each."""
    between: str = ""
    closing: str = ""
    line: str = ""
    """Between the parts of a call: a line's end, or nothing."""
    id_marker: str | None = None
    """What begins an id behind the name, where the model may write one."""
    several: bool = True
    """Whether it may write more than one call."""

    @property
    def opened(self) -> str:
        """All that stands before the first call."""
        return self.opening + self.begin


HARMONY = Form(grammar=None, several=False)
"""Of gpt-oss, which may think before the call."""


def form_of(grammar: Grammar | None, template: str) -> Form | None:
    """How the models of a chat template write calls of a grammar; None: not known."""
    if grammar is None:
        return None
    known = (one for one in grammar.openers if one in template)
    opener = next(known, (*grammar.openers, "")[0])
    form = Form(grammar=grammar, closing=closer_of(grammar, opener))
    match grammar:
        case TagCalls():
            return _tag_form(form, grammar, opener)
        case KeyValueCalls(begin=None):
            line = "" if f"{grammar.key[1]}{grammar.value[0]}" in template else "\n"
            return evolve(form, begin=opener, between="\n", closing="", line=line)
        case KeyValueCalls():
            section = evolve(form, opening=f"{opener}\n", begin=grammar.begin or "", end="\n")
            return evolve(section, line="\n")
        case TreeCalls():
            return evolve(form, opening=f"{opener}\n", end="\n")
        case PythonCalls(brackets=False):
            section = evolve(form, opening=f"{opener}\n", between="\n")
            return evolve(section, closing=f"\n{form.closing}")
        case PythonCalls():
            return evolve(form, opening=f"{opener}[", between=", ", closing=f"]{form.closing}")
        case NamedCalls():
            return _named_form(form, grammar, opener, template)
    return None


def closer_of(grammar: Grammar, opener: str) -> str:
    """The marker that closes what ``opener`` begins; empty: there is none."""
    closers = [one for one in grammar.closers if one[2:] == opener[1:]]
    return (closers or [*grammar.closers, ""])[0]


def _tag_form(form: Form, grammar: TagCalls, opener: str) -> Form:
    if grammar.lines:  # each call in a section of its own
        opener, closer = grammar.openers[0], grammar.closers[0]
        section = evolve(form, begin=f"{opener}\n", end=f"\n{closer}", between="\n")
        return evolve(section, closing="", line="\n")
    if opener == grammar.call:
        return form
    before, after = "".join(grammar.before_calls), "".join(grammar.after_calls)
    section = evolve(form, opening=f"{opener}\n", begin=before, end=f"{after}\n")
    return evolve(section, line="\n")


def _named_form(form: Form, grammar: NamedCalls, opener: str, template: str) -> Form:
    if not grammar.begin:  # the opener begins each call
        marked = grammar.id_marker if (grammar.id_marker or "\0") in template else None
        section = evolve(form, begin=opener, end=(*grammar.end, "")[0], closing="")
        return evolve(section, id_marker=marked)
    begin, end = grammar.begin[0], (*grammar.end, "")[0]
    fenced = grammar.kind is not None and "```json" in template
    if fenced:
        begin, end = f"{begin}{grammar.kind}{grammar.separators[0]}", f"\n```{end}"
    return evolve(form, opening=opener, begin=begin, end=end, line="\n```json\n" if fenced else "")


def calls_grammar(
    form: Form, conversation: Conversation, specials: Mapping[str, int], *, opened: bool
) -> str:
    """A grammar of the calls that the conversation's tool choice asks for.

    ``opened``: the prompt ends with the form's opening and what begins the first call. Raises
    RequestError for what a grammar has no words for.
    """
    writer = _Writer(specials)
    start = _section(form, conversation, writer)
    if form.grammar is None:
        before = writer.literal("<|channel|>analysis<|message|>")
        after = writer.literal("<|end|><|start|>assistant")
        start = f"({before} TEXT {after})? {start}"
        writer.lines.append("TEXT: /(?s:.*)/")
    elif not opened:
        start = f"SPACE? {writer.literal(form.opened)} {start}"
        writer.lines.append(r"SPACE: /\n{1,3}/")
    return "\n".join([f"start: {start}", *writer.lines])


def free_grammar(form: Form, conversation: Conversation, specials: Mapping[str, int]) -> str:
    """A grammar of text in which calls may be: those of strict tools follow their schemas.

    Raises RequestError as ``calls_grammar``, and for a form without a marker that begins calls.
    """
    writer = _Writer(specials)
    if form.grammar is None:
        start, lines = _free_channels(_section(form, conversation, writer), writer)
    else:
        start, lines = _free_text(form, conversation, writer)
    return "\n".join([f"start: {start}", *lines, *writer.lines])


def _section(form: Form, conversation: Conversation, writer: _Writer) -> str:
    """All calls of one section, without what opens it."""
    calls = [writer.rule(_call(form, tool, writer)) for tool in chosen_tools(conversation)]
    call = writer.rule(" | ".join(calls))
    begin, end = writer.literal(form.begin), writer.literal(form.end)
    more = ""
    if form.several and _are_parallel(conversation):
        more = f"({writer.literal(form.between)} {begin} {call} {end})*"
    return f"{call} {end} {more} {writer.literal(form.closing)}"


def _are_parallel(conversation: Conversation) -> bool:
    return conversation.tool_choice is None or conversation.tool_choice.parallel


def _free_channels(calls: str, writer: _Writer) -> tuple[str, list[str]]:
    """Messages of harmony, of which the last is a call or what the user gets."""
    begin, message = writer.literal("<|channel|>"), writer.literal("<|message|>")
    over, kind = writer.literal("<|end|><|start|>assistant"), writer.literal(" <|constrain|>json")
    before = f'({begin} ("analysis" | "commentary") {message} TEXT {over})*'
    last = f'{begin} ("final" ({kind})? | "commentary" | "analysis") {message} TEXT'
    return f"{before} ({calls} | {last})", ["TEXT: /(?s:.*)/"]


def _free_text(form: Form, conversation: Conversation, writer: _Writer) -> tuple[str, list[str]]:
    grammar, specials = form.grammar, writer.specials
    assert grammar is not None
    opener = next((one for one in grammar.openers if form.opened.startswith(one)), None)
    if opener is None or grammar.line_openers:
        raise RequestError(
            "tools: strict: no marker of its own begins this model's calls, which cannot be held "
            'to schemas where it may call; leave strict out, or use tool_choice "required"',
            "tools",
            "unsupported_parameter",
        )
    calls = _section(form, conversation, writer)
    firsts = [_pieces(one, specials)[0] for one in grammar.openers]
    texts = [one for one in firsts if one not in specials]
    others = [one for text, one in specials.items() if text not in firsts]
    between = f"(TEXT? <[{','.join(map(str, sorted(others)))}]>)*" if others else ""
    lines = [f"free: {between} TEXT?", f"TEXT: {_text_without(texts)}"]
    first, *rest = _pieces(opener, specials)
    if first in specials:
        opened = f"free {writer.literal(opener)}"
    else:
        apart = [one for one in texts if one not in first and first not in one]
        lines += [f"UNTIL: {_text_without(apart, '*')}", f"opened[suffix={_quoted(first)}]: UNTIL"]
        opened = f"{between} opened {writer.literal(''.join(rest))}"
    section = f"{opened} {writer.literal(form.opened.removeprefix(opener))} {calls}"
    return f"({section}){'*' if _are_parallel(conversation) else '?'} free", lines


def _text_without(excluded: Sequence[str], length: str = "+") -> str:
    if not excluded:
        return f"/(?s:.{length})/"
    return f"/(?s:.{length})/ & ~/(?s:.*({'|'.join(map(_escaped, excluded))}).*)/"


def literal(text: str, specials: Mapping[str, int]) -> str:
    """``text`` in a grammar's words, where special tokens are numbers."""
    return " ".join(
        f"<[{specials[piece]}]>" if piece in specials else _quoted(piece)
        for piece in _pieces(text, specials)
    )


def _pieces(text: str, specials: Mapping[str, int]) -> list[str]:
    known = [re.escape(one) for one in sorted(specials, key=len, reverse=True) if one in text]
    found = re.split(f"({'|'.join(known)})", text) if known else [text]
    return [one for one in found if one]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class _Writer:
    """The rules of one grammar."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self.specials = specials
        self.lines: list[str] = []

    def literal(self, text: str) -> str:
        return literal(text, self.specials)

    def rule(self, body: str, attributes: str = "") -> str:
        name = f"r{len(self.lines)}"
        self.lines.append(f"{name}{attributes}: {body}")
        return name

    def json(self, schema: Mapping[str, Any], **options: Any) -> str:
        options = {"whitespace_flexible": True, "whitespace_pattern": _JSON_SPACE, **options}
        return f"%json {json.dumps({**schema, 'x-guidance': options})}"

    def text(
        self,
        expressions: Sequence[str],
        line: str,
        end: str,
        *,
        excluded: Sequence[str],
        separate: bool,
    ) -> str:
        """Text that all of ``expressions`` match, up to ``line`` and ``end``.

        ``excluded`` do not occur in it; with ``separate`` it looks like no other JSON.
        """
        after = _escaped(line)
        found = [*expressions, f"({_SEPARATE})?"] if separate else expressions
        words = [f"/({one}){after}/" if after else f"/{one}/" for one in found]
        if excluded:
            any_of = "|".join(map(_escaped, excluded))
            words.append(f"~/(?s:.*({any_of}).*)/")
        if separate:
            words.append(f"~/{_WORDS}{after}/")
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {' & '.join(words)}")
        first, *rest = _pieces(end, self.specials)
        if first in self.specials:
            return f"{name} {self.literal(end)}"
        found = self.rule(name, f"[suffix={_quoted(first)}]")
        return f"{found} {self.literal(''.join(rest))}"


def _escaped(text: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/-]", lambda one: "\\" + one[0], text)
    return escaped.replace("\n", "\\n")


def _call(form: Form, tool: Tool, writer: _Writer) -> str:
    """One tool's call, between what begins and ends each."""
    grammar, name = form.grammar, tool.name
    if grammar is None:
        # The recipient stands in the channel's header, or before it, as in the template.
        channel, to = "<|channel|>commentary", f" to=functions.{name}"
        either = f"{writer.literal(channel + to)} | {writer.literal(to + channel)}"
        kind = f"({writer.literal(' <|constrain|>json')} | {writer.literal(' json')})?"
        return f"({either}) {kind} {writer.literal('<|message|>')} {_object(tool, writer)}"
    match grammar:
        case NamedCalls():
            return _named(form, grammar, tool, writer)
        case PythonCalls():
            return _python(tool, writer)
        case TagCalls():
            head, tail = f"{grammar.call}{name}{grammar.call_tag_ends[0]}", grammar.call_end
        case KeyValueCalls():
            line = form.line if grammar.name_end == "\n" else grammar.name_end
            head, tail = f"{name}{line}", grammar.call_end
        case TreeCalls():
            head, tail = f'{grammar.mark}<invoke name="{name}">', f"{grammar.mark}</invoke>"
        case _:
            raise AssertionError(grammar)
    line = "" if isinstance(grammar, KeyValueCalls) else form.line
    parts = [writer.literal(head + line)]
    for key, needed, schema in _arguments(tool):
        values = " | ".join(_values(form, tool, key, schema, writer))
        after = writer.literal(form.line)
        parts.append(
            f"{writer.rule(values)} {after}" if needed else f"[{writer.rule(values)} {after}]"
        )
    return " ".join([*parts, writer.literal(tail)])


def _named(form: Form, grammar: NamedCalls, tool: Tool, writer: _Writer) -> str:
    name, before, separator = tool.name, "", (*grammar.separators, "")[0]
    if grammar.id_first is not None:
        before = f"/[a-z0-9]{{10}}/ {writer.literal(grammar.id_first)}"
    if grammar.name_is_id:
        name = f"functions.{name}"
        separator_words = f'":" /[0-9]{{1,3}}/ {writer.literal(separator)}'
    elif grammar.kind is not None and form.line:
        separator_words = writer.literal(form.line)
    else:
        separator_words = writer.literal(separator)
    if form.id_marker is not None:
        separator_words = (
            f"({writer.literal(form.id_marker)} /[a-zA-Z0-9]{{9}}/)? {separator_words}"
        )
    return f"{before} {writer.literal(name)} {separator_words} {_object(tool, writer)}"


def _object(tool: Tool, writer: _Writer, **options: Any) -> str:
    """All arguments as one JSON object."""
    given = {key: one for key, one in tool.parameters.items() if key not in {"$schema", "$id"}}
    if not given:
        given = {"properties": {}, "additionalProperties": False}
    if "$ref" not in given:
        given["type"] = "object"
    return writer.json(given, **options)


def _python(tool: Tool, writer: _Writer) -> str:
    for key, _, _ in [("", True, None), *_arguments(tool)]:
        if not _PYTHON_NAME.fullmatch(key or tool.name):
            raise no_words(tool, key, "is no name in Python")
    needed, optional = list[str](), list[str]()
    for key, is_needed, schema in _arguments(tool):
        value = writer.json(_by_itself(tool, schema), json_allowed_escapes=_PLAIN_ESCAPES)
        found = writer.rule(f"{_quoted(f'{key}=')} {value}")
        (needed if is_needed else optional).append(found)
    # Optional ones come last, so that each may have a comma before it.
    inside = ' ", " '.join(needed)
    for number, one in enumerate(optional):
        before = '", "' if inside or number else ""
        if needed:
            inside += f" ({before} {one})?"
    if not needed and optional:
        rest = ""
        for one in reversed(optional):  # the first that is there has no comma
            rest = f"{one} {_after(optional, one)}" + (f" | {rest}" if rest else "")
        inside = f"({rest})?"
    return f"{_quoted(f'{tool.name}(')} {inside} {_quoted(')')}"


def _after(optional: Sequence[str], one: str) -> str:
    later = optional[optional.index(one) + 1 :]
    return " ".join(f'(", " {other})?' for other in later)


def _arguments(tool: Tool) -> Iterator[tuple[str, bool, Any]]:
    """(key, whether it is required, schema) of each.

    Raises RequestError for a tool whose arguments are not stated one by one.
    """
    schema: Any = tool.parameters
    for _ in range(DEPTH):
        if "$ref" not in schema:
            break
        schema = resolved(tool, schema)
    for keyword in schema:
        if keyword not in _NOTES | _OF_ARGUMENTS:
            raise no_words(tool, "", f"{keyword} cannot be enforced")
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    for key, one in properties.items():
        if not _NAME.fullmatch(key):
            raise no_words(tool, key, "its name cannot be written")
        if one is not False:
            yield key, key in required, {} if one is True else one
    missing = [key for key in required if key not in properties]
    for key in missing:
        if not _NAME.fullmatch(key) or schema.get("additionalProperties") is False:
            raise no_words(tool, key, "it is required and not described")
        yield key, True, {}


@frozen(kw_only=True)
class _Place:
    """Where an argument's value stands."""

    begin: str
    """Before text, and before JSON, too, where the model does not say which it is."""
    begin_json: str | None = None
    line: str = ""
    """What of its end belongs to the line."""
    end: str
    excluded: Sequence[str]
    """What would end the text as well."""


def _place(form: Form, key: str) -> _Place:
    grammar = form.grammar
    match grammar:
        case TagCalls():
            line = "\n" if grammar.lines else ""
            begin, end = f"{grammar.argument}{key}", grammar.argument_end
            text_ends, *other_ends = grammar.argument_tag_ends
            return _Place(
                begin=f"{begin}{text_ends}{line}",
                begin_json=f"{begin}{other_ends[0]}" if grammar.types else None,
                line=line,
                end=end,
                excluded=[one.literal for one in grammar.endings if one.literal != end],
            )
        case KeyValueCalls():
            begin = f"{grammar.key[0]}{key}{grammar.key[1]}{form.line}{grammar.value[0]}"
            return _Place(begin=begin, end=grammar.value[1], excluded=[grammar.call_end])
        case TreeCalls():
            mark = grammar.mark
            return _Place(begin=f"{mark}<{key}>", end=f"{mark}</{key}>", excluded=[mark])
    raise AssertionError(grammar)


def _values(form: Form, tool: Tool, key: str, schema: Any, writer: _Writer) -> Iterator[str]:
    """Alternatives of one argument, from its beginning to its end."""
    place = _place(form, key)
    types = types_of(schema, tool.parameters)
    others = types - {"string"}
    if place.begin_json is not None and "string" in types:
        types = frozenset({"string"})  # what is said to be text is read as text
    alone = types == {"string"}
    excluded = [one for one in place.excluded if one not in writer.specials]
    begin, line, end = writer.literal(place.begin), place.line, place.end
    for found in texts_of(tool, key, schema):
        if not isinstance(found, str):
            text = writer.text(found, line, end, excluded=excluded, separate=not alone)
            yield f"{begin} {text}"
        elif any(one in found for one in (end, *excluded)):
            raise no_words(tool, key, "a text among its values holds a marker of the model")
        elif alone or json_of(found, types) == json.dumps(found, ensure_ascii=False):
            words = f"{_quoted(found)} " if found else ""
            yield f"{begin} {words}{writer.literal(line + end)}"
    if others:
        value = writer.json(without_type(_by_itself(tool, schema), others))
        before = writer.literal(place.begin_json or place.begin)
        yield f"{before} {value} {writer.literal(line + end)}"


def _by_itself(tool: Tool, schema: Any) -> dict[str, Any]:
    """The schema of an argument, by itself."""
    if "$ref" not in json.dumps(schema):
        return dict(schema)
    place = "#/$defs/tool"
    found: dict[str, Any] = moved(schema, place)
    return {**found, "$defs": {"tool": moved(tool.parameters, place)}}
