"""The shapes in which models write calls. A family is one of them with its own markers."""

from __future__ import annotations

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Generator
from functools import cache

from attrs import define, field, frozen

from commutator_parsers.calls import Call, Calls, json_of
from commutator_parsers.reader import Malformed, Reader, Steps, json_text, reads_json


@cache
def alternatives(*literals: str) -> re.Pattern[str]:
    """What finds the first of ``literals``; of those that begin alike the longest."""
    longest_first = sorted(literals, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@frozen(kw_only=True)
class Grammar(ABC):
    """How one family writes calls, from an opening marker to what closes them."""

    openers: tuple[str, ...] = ()
    """Markers after which calls follow, wherever they stand."""
    line_openers: tuple[str, ...] = ()
    """Beginnings of calls that count at the beginning of a line only."""
    closers: tuple[str, ...] = ()
    """Markers that may follow the calls; they are read, too."""
    spaced: bool = True
    """White space around the calls belongs to their format, not to the text."""

    @abstractmethod
    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        """Read the calls after ``opener``, which was read.

        After each whole call, what was read is forgotten. Raises Malformed for what is no call.
        """

    def close(self, reader: Reader) -> Steps:
        """Read the closing markers that follow."""
        while self.closers and (yield from reader.literal(*self.closers)):
            reader.forget()


_NAME_KEYS = {"name", "tool_name", "function_name"}
_ARGUMENT_KEYS = {"arguments", "parameters", "args", "input"}
_ID_KEYS = {"id", "call_id", "tool_call_id"}


@frozen(kw_only=True)
class JsonCalls(Grammar):
    """``{"name": N, "arguments": {...}}``: one, several, or an array of them."""

    keyed: bool = False
    """Each object has one key, the tool's name, with the arguments as its value."""
    listed: bool = False
    """The model writes an array, where it is told what to write; otherwise one object."""
    name_key: str = "name"
    """What it calls the name, likewise."""
    argument_key: str = "arguments"
    """What it calls the arguments, likewise."""
    after_opener: str = ""
    """The white space that its template has behind the opener."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        bare = opener in self.line_openers
        if bare:
            opened = opener  # "{" or "[", which is part of the JSON
        else:
            opened = yield from reader.expect("{", "[", "```json")
            if opened == "```json":
                opened = yield from reader.expect("{", "[")
        if opened == "[":
            if (yield from reader.literal("]")):  # no calls at all
                if bare:
                    raise Malformed
                yield from self.close(reader)
                return
            yield from reader.expect("{")
        while True:
            yield from self._call(reader, calls, bare)
            reader.forget()
            if opened == "[" and (yield from reader.literal("]")):
                break
            if opened == "{" and not (yield from self._another(reader, bare)):
                break
            reader.keep()
            yield from reader.expect(*(("{",) if opened == "{" else (",",)))
            if opened == "[":
                yield from reader.expect("{")
        yield from self.close(reader)

    def _another(self, reader: Reader, bare: bool) -> Generator[None, None, bool]:
        """Whether one more object follows."""
        while True:
            rest = reader.text.lstrip()
            if rest[:1] in {";", ","} and len(rest) > 1:
                rest = rest[1:].lstrip()
                if rest[:1] == "{":
                    yield from reader.literal(";", ",")
                    return True
            elif rest:
                if rest[0] in {";", ","} and not reader.done:
                    yield
                    continue
                return rest[0] == "{"
            if reader.done or (bare and rest):
                return False
            yield

    def _call(self, reader: Reader, calls: Calls, bare: bool) -> Steps:
        if self.keyed:
            name = yield from reader.json_value()
            yield from reader.expect(":")
            if not isinstance(name, str):
                raise Malformed
            call = calls.start(name)
            yield from _arguments(reader, call)
            yield from reader.expect("}")
            call.end()
            return
        yield from self._fields(reader, calls, bare)

    def _fields(self, reader: Reader, calls: Calls, bare: bool) -> Steps:
        """The rest of an object after its brace."""
        known = _Fields()
        ended = bool((yield from reader.literal("}")))
        while not ended:
            key = yield from reader.json_value()
            yield from reader.expect(":")
            if key == "function" and known.name is None:
                yield from reader.space()
                if reader.text[:1] == "{":  # the call is one level deeper
                    reader.take(1)
                    yield from self._fields(reader, calls, bare)
                    yield from reader.expect("}")
                    return
                key = "name"
            yield from self._field(reader, calls, known, key, bare)
            ended = (yield from reader.expect(",", "}")) == "}"
        if known.call is None:
            if known.name is None or (bare and known.arguments is None):
                raise Malformed
            known.call = calls.start(known.name, known.id)
            if known.arguments is not None:
                known.call.arguments(_object_text(known.arguments))
        known.call.end()

    def _field(
        self, reader: Reader, calls: Calls, known: _Fields, key: object, bare: bool
    ) -> Steps:
        """The value of ``key``."""
        if key in _ARGUMENT_KEYS and known.call is None and known.arguments is None:
            if known.name is not None:
                known.call = calls.start(known.name, known.id)
                yield from _arguments(reader, known.call)
            else:  # the name comes later
                pieces: list[str] = []
                yield from reader.json(pieces.append)
                known.arguments = "".join(pieces)
            return
        value = yield from reader.json_value()
        if key in _NAME_KEYS and known.name is None:
            if not isinstance(value, str) or value not in calls.tools:
                raise Malformed
            known.name = value
        elif key in _ID_KEYS:
            known.id = value if isinstance(value, str) else None
        elif bare and key != "type":
            raise Malformed


@define
class _Fields:
    """What is known of a call so far."""

    name: str | None = None
    id: str | None = None
    arguments: str | None = None
    """They came before the name."""
    call: Call | None = None
    """Once it has begun."""


def _arguments(reader: Reader, call: Call) -> Steps:
    """An object, which is passed on as it comes, or a string that holds one."""
    yield from reader.space()
    if not reader.text:
        raise Malformed
    if reader.text[0] == "{":
        yield from reader.json(call.arguments)
        return
    pieces: list[str] = []
    yield from reader.json(pieces.append)
    call.arguments(_object_text("".join(pieces)))


def _object_text(text: str) -> str:
    value = reads_json(text)
    if isinstance(value, str):
        text, value = value, reads_json(value or "{}")
    if value is None or text == "":
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


@frozen(kw_only=True)
class NamedCalls(Grammar):
    """The tool's name between markers, then the arguments as JSON."""

    begin: tuple[str, ...] = ()
    """What begins each call after the opener; none: the opener does."""
    prefixes: tuple[str, ...] = ()
    """What may stand before the name."""
    separators: tuple[str, ...] = ()
    """What ends the name."""
    id_marker: str | None = None
    """After the name, what begins an id."""
    before_json: tuple[str, ...] = ()
    """What may stand before the arguments."""
    after_json: tuple[str, ...] = ()
    """What may stand after them."""
    end: tuple[str, ...] = ()
    """What ends each call, required where there is any."""
    name_is_id: bool = False
    """The name is written as functions.NAME:INDEX, which is the call's id, too."""
    id_first: str | None = None
    """What ends an id that stands before the name."""
    kind: str | None = None
    """A word that may stand in the name's place; the name is then the rest of the line."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        any_call = False
        while True:
            if self.begin and not (yield from self._begin(reader, any_call)):
                break
            yield from self._call(reader, calls)
            any_call = True
            reader.forget()
            if not self.begin:
                break
            reader.keep()
        yield from self.close(reader)

    def _begin(self, reader: Reader, any_call: bool) -> Generator[None, None, bool]:
        """Read the beginning of a call, and whatever stands before it; False after the last one."""
        noise, found = yield from reader.until(
            alternatives(*self.begin, *self.closers), (*self.begin, *self.closers)
        )
        if found in self.begin:
            return True
        if noise.strip() and not any_call:
            raise Malformed
        reader.forget()
        return False

    def _call(self, reader: Reader, calls: Calls) -> Steps:
        name, id_ = yield from self._name(reader)
        if self.before_json:
            yield from reader.literal(*self.before_json)
        yield from reader.space()
        if self.end and (yield from reader.literal(*self.end)):
            calls.start(name, id_).end()
            return
        if not reader.text.startswith("{"):
            raise Malformed
        call = calls.start(name, id_)
        yield from reader.json(call.arguments)
        if self.after_json:
            yield from reader.literal(*self.after_json)
        if self.end:
            yield from reader.expect(*self.end)
        call.end()

    def _name(self, reader: Reader) -> Generator[None, None, tuple[str, str | None]]:
        """(name, id), the latter where one is written."""
        ends = (*self.separators, *((self.id_marker,) if self.id_marker else ()))
        id_: str | None = None
        if self.id_first is not None:
            id_, _ = yield from reader.until(alternatives(self.id_first), (self.id_first,))
        name, found = yield from reader.until(alternatives(*ends), ends)
        if found == self.id_marker:
            id_, _ = yield from reader.until(alternatives(*self.separators), self.separators)
        if self.kind is not None and name.strip() == self.kind:
            name, _ = yield from reader.until(alternatives("\n"), ("\n",))
        name = name.strip()
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        if self.name_is_id:
            id_ = name
            name = name.removeprefix("functions.").rpartition(":")[0] or name
        return name.strip(), id_


@frozen(kw_only=True)
class EitherCalls(Grammar):
    """JSON with the names in it, or names with JSON behind them, after the same marker."""

    with_names: JsonCalls
    behind_names: NamedCalls

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        yield from reader.space()
        grammar = self.with_names if reader.text[:1] in {"[", "{"} else self.behind_names
        yield from grammar.read(reader, calls, opener)


@frozen(kw_only=True)
class _Ending:
    """What ends an argument's text.

    Within the text the same characters may occur, so it counts only where the right thing follows.
    """

    literal: str
    follows: tuple[str, ...]
    """After white space; the end of the answer counts as well."""
    line: bool = False
    """It counts at the beginning of a line only."""
    stays: bool = False
    """It is not read with the argument."""


def _argument_text(
    reader: Reader, endings: tuple[_Ending, ...], call: Call, types: frozenset[str], lines: bool
) -> Steps:
    """Read an argument's text up to its ending, and write its JSON.

    ``lines``: one line end after its beginning, and one before its ending, are not part of it.
    """
    literals = tuple(ending.literal for ending in endings)
    by_literal = {ending.literal: ending for ending in endings}
    pattern = alternatives(*literals)
    if lines:
        yield from reader.literal("\n", space=False)
    streams = types == {"string"}
    pieces: list[str] = []
    if streams:
        call.arguments('"')
    at = 0
    before = "\n"  # what was read last
    while True:
        match = reader.find(pattern, at)
        verdict: bool | None = False
        if match is None:
            safe = reader.unfinished(literals, at)
        else:
            ending, safe = by_literal[match[0]], match.start()
            verdict = _really_ends(reader, ending, match, before)
            if verdict is False:
                at = match.end()
                continue
        cut = safe
        if lines and (match is not None or not reader.done) and reader.text[:safe].endswith("\n"):
            cut -= 1
        if cut and (streams or verdict):
            piece = reader.take(cut)
            before = piece[-1]
            if streams:
                call.arguments(json_text(piece))
            else:
                pieces.append(piece)
            safe -= cut
            at = 0
        if verdict:
            reader.take(safe + (0 if ending.stays else len(ending.literal)))
            break
        at = safe
        yield from reader.more()
    call.arguments('"' if streams else json_of("".join(pieces), types))


def _really_ends(reader: Reader, ending: _Ending, match: re.Match[str], before: str) -> bool | None:
    """Whether the right thing follows; None while that is open."""
    start = match.start()
    text = reader.text
    if ending.line and (text[start - 1] if start else before) != "\n":
        return False
    end = match.end()
    while end < len(text) and text[end].isspace():
        end += 1
    for follow in ending.follows:
        if text.startswith(follow, end):
            return True
    if reader.done:
        return end == len(text)
    rest = len(text) - end
    if any(len(follow) > rest and follow.startswith(text[end:]) for follow in ending.follows):
        return None
    return False


@frozen(kw_only=True)
class TagCalls(Grammar):
    """Tags: a call's tag holds the name, and each argument's tag a key around plain text."""

    call: str
    """The beginning of a call's tag, up to the name, such as ``<invoke name="``."""
    call_tag_ends: tuple[str, ...]
    """What ends that tag; "/>" ends the call, too."""
    call_end: str
    argument: str
    """The beginning of an argument's tag, up to the key."""
    argument_tag_ends: tuple[str, ...]
    """What ends that tag."""
    argument_end: str
    lines: bool = False
    """One line end after an argument's tag and one before its end belong to the format."""
    types: tuple[tuple[str, str], ...] = ()
    """Ends of an argument's tag that tell its type: "string" or "json"."""
    before_calls: tuple[str, ...] = ()
    """Markers that may stand before a call's tag."""
    after_calls: tuple[str, ...] = ()
    """Markers that may follow a call's end before the next call."""
    cdata: bool = False
    """An argument's text may stand in ``<![CDATA[`` and ``]]>``."""
    endings: tuple[_Ending, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        after_argument = (self.argument, self.call_end)
        after_call = (*self.after_calls, *self.closers, self.call, *self.openers)
        found = (
            _Ending(literal=self.argument_end, follows=after_argument),
            # Models forget to end an argument.
            _Ending(literal=self.call_end, follows=after_call, line=self.lines, stays=True),
            *(
                (_Ending(literal=self.argument, follows=("",), line=True, stays=True),)
                if self.lines
                else ()
            ),
        )
        object.__setattr__(self, "endings", found)

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        found = opener if opener == self.call else ""
        any_call = False
        while True:
            while not found and self.before_calls:
                if not (yield from reader.literal(*self.before_calls)):
                    break
            if not found:
                found = yield from reader.literal(self.call, *self.closers)
                if not found and not any_call:
                    raise Malformed
            if found != self.call:
                break
            yield from self._call(reader, calls)
            any_call = True
            reader.forget()
            while self.after_calls and (yield from reader.literal(*self.after_calls)):
                pass
            found = ""
            if not self.closers or opener == self.call:
                break
            reader.keep()
        reader.forget()
        yield from self.close(reader)

    def _call(self, reader: Reader, calls: Calls) -> Steps:
        name, found = yield from reader.until(alternatives(*self.call_tag_ends), self.call_tag_ends)
        call = calls.start(_bare(name))
        if found.endswith("/>"):
            call.end()
            return
        while True:
            found = yield from reader.literal(self.argument, self.call_end)
            if found != self.argument:
                break
            key, tag_end = yield from reader.until(
                alternatives(*self.argument_tag_ends), self.argument_tag_ends
            )
            types = call.key(_bare(key))
            for end, kind in self.types:
                if end == tag_end:
                    types = frozenset({"string"}) if kind == "string" else types - {"string"}
            endings = self.endings
            if self.cdata and (yield from reader.literal("<![CDATA[")):
                end = f"]]>{self.argument_end}"
                endings = (_Ending(literal=end, follows=(self.argument, self.call_end)),)
            yield from _argument_text(reader, endings, call, types, self.lines)
        if not found:
            raise Malformed
        call.end()


def _bare(name: str) -> str:
    return name.strip().strip("\"'")


@frozen(kw_only=True)
class KeyValueCalls(Grammar):
    """The name, then each argument as a key and a value within tags of their own."""

    begin: str | None = None
    """What begins each call after the opener; None: the opener does."""
    name_end: str = "\n"
    """What may end the name."""
    call_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    endings: tuple[_Ending, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        after_call = (*self.closers, *((self.begin,) if self.begin else self.openers))
        found = (
            _Ending(literal=self.value[1], follows=(self.key[0], self.call_end)),
            _Ending(literal=self.call_end, follows=after_call, stays=True),
        )
        object.__setattr__(self, "endings", found)

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        if self.begin is None:
            yield from self._call(reader, calls)
            return
        yield from reader.expect(self.begin)
        while True:
            yield from self._call(reader, calls)
            reader.keep()
            if not (yield from reader.literal(self.begin)):
                break
        reader.forget()
        yield from self.close(reader)

    def _call(self, reader: Reader, calls: Calls) -> Steps:
        key_begins, key_ends = self.key
        ends = (self.name_end, key_begins, self.call_end)
        name, found = yield from reader.until(alternatives(*ends), ends)
        if not name.strip() and found == "\n":
            name, found = yield from reader.until(alternatives(*ends), ends)
        call = calls.start(name.strip())
        if found == self.name_end:
            found = yield from reader.expect(key_begins, self.call_end)
        while found == key_begins:
            key, _ = yield from reader.until(alternatives(key_ends), (key_ends,))
            types = call.key(key.strip())
            yield from reader.expect(self.value[0])
            yield from _argument_text(reader, self.endings, call, types, lines=False)
            found = yield from reader.expect(key_begins, self.call_end)
        call.end()
        reader.forget()


@frozen(kw_only=True)
class TreeCalls(Grammar):
    """Tags named after the arguments; lists and objects are trees of them."""

    mark: str
    """Stands before each tag, so that no text is taken for one."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        any_call = False
        begin = f'{self.mark}<invoke name="'
        while not any_call or (yield from reader.literal(begin, *self.closers)) == begin:
            if not any_call:
                yield from reader.expect(begin)
            name, _ = yield from reader.until(alternatives('">'), ('">',))
            call = calls.start(name)
            while (tag := (yield from self._tag(reader))) != "/invoke":
                types = call.key(tag)
                yield from self._value(reader, call, tag, types, call.schema_of(tag))
            call.end()
            any_call = True
            reader.forget()
            reader.keep()
        reader.forget()

    def _tag(self, reader: Reader) -> Generator[None, None, str]:
        yield from reader.expect(f"{self.mark}<")
        name, _ = yield from reader.until(alternatives(">"), (">",))
        return name

    def _value(
        self, reader: Reader, call: Call, tag: str, types: frozenset[str], schema: object
    ) -> Steps:
        """Read up to the end of ``tag``, and write the JSON."""
        streams = types == {"string"}
        pieces: list[str] = []
        if streams:
            call.arguments('"')
        pattern = alternatives(self.mark)
        while True:
            match = reader.find(pattern)
            safe = reader.unfinished((self.mark,)) if match is None else match.start()
            if safe:
                piece = reader.take(safe)
                if streams:
                    call.arguments(json_text(piece))
                else:
                    pieces.append(piece)
            if match is not None:
                break
            yield from reader.more()
        inner = yield from self._tag(reader)
        if inner == f"/{tag}":
            call.arguments('"' if streams else json_of("".join(pieces), types))
            return
        if streams or "".join(pieces).strip():
            raise Malformed
        yield from self._tree(reader, call, tag, inner, types, schema)

    def _tree(
        self,
        reader: Reader,
        call: Call,
        tag: str,
        inner: str,
        types: frozenset[str],
        schema: object,
    ) -> Steps:
        """Read a list or an object, whose first tag was ``inner``, up to the end of ``tag``."""
        as_list = inner == "item" and ("array" in types or "object" not in types)
        before = "[" if as_list else "{"
        while inner != f"/{tag}":
            call.arguments(before)
            before = ", "
            if not as_list:
                call.arguments(json.dumps(inner, ensure_ascii=False) + ": ")
            below = call.below(schema, None if as_list else inner)
            yield from self._value(reader, call, inner, call.types(below), below)
            inner = yield from self._tag(reader)
        call.arguments("]" if as_list else "}")


_IDENTIFIER = re.compile(r"[A-Za-z_][\w.\-]*")
_PLAIN = re.compile(r"[^\\'\"\n]*")
_LITERAL_ENDS = re.compile(r"[,()\[\]{}'\"]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_PYTHON_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False}


@frozen(kw_only=True)
class PythonCalls(Grammar):
    """``[f(a='x', b=1), g()]``: calls as in Python, with literals as arguments."""

    brackets: bool = True
    """The calls stand in a list; otherwise one a line."""

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        if self.brackets and opener not in self.line_openers:
            yield from reader.expect("[")
        complete: list[Call] = []
        while True:
            name = yield from self._identifier(reader)
            yield from reader.expect("(", space=False)
            call = calls.start(name, held=bool(complete))
            yield from self._call(reader, call)
            if self.brackets:  # a list is whole, or no list
                complete.append(call)
                if (yield from reader.expect(",", "]")) == "]":
                    break
                continue
            call.tell_end()
            reader.forget()
            yield from reader.space()
            if not _IDENTIFIER.match(reader.text):
                break
            reader.keep()
        for call in complete:
            call.tell_end()
        reader.forget()
        yield from self.close(reader)

    def _identifier(self, reader: Reader) -> Generator[None, None, str]:
        yield from reader.space()
        while True:
            match = _IDENTIFIER.match(reader.text)
            if match is None and reader.text:
                raise Malformed
            if match is not None and (match.end() < len(reader.text) or match.end() > 256):  # noqa: PLR2004
                return reader.take(match.end())
            yield from reader.more()

    def _call(self, reader: Reader, call: Call) -> Steps:
        ended = bool((yield from reader.literal(")")))
        while not ended:
            key = yield from self._identifier(reader)
            yield from reader.expect("=")
            call.key(key)
            yield from reader.space()
            if reader.text[:1] in {"'", '"'}:
                call.arguments('"')
                yield from _python_string(reader, call)
                call.arguments('"')
            else:
                call.arguments((yield from _python_literal(reader)))
            ended = (yield from reader.expect(",", ")")) == ")"
            if not ended:
                ended = bool((yield from reader.literal(")")))
        call.complete()


def _python_string(reader: Reader, call: Call) -> Steps:
    quote = reader.take(1)
    plain = re.compile(rf"[^\\{quote}]*")
    while True:
        end = plain.match(reader.text).end()  # type: ignore[union-attr]
        if end:
            call.arguments(json_text(reader.take(end)))
        if reader.text.startswith(quote):
            reader.take(1)
            return
        if len(reader.text) > 1:  # an escape
            character = reader.text[1]
            if character in _ESCAPES:
                reader.take(2)
                call.arguments(json_text(_ESCAPES[character]))
                continue
            length = {"x": 4, "u": 6, "U": 10}.get(character)
            if length is None:  # Python keeps the backslash of what is no escape
                call.arguments(json_text(reader.take(2)))
                continue
            if len(reader.text) >= length:
                digits = reader.take(length)[2:]
                try:
                    call.arguments(json_text(chr(int(digits, 16))))
                except (ValueError, OverflowError):
                    raise Malformed from None
                continue
        yield from reader.more()


def _python_literal(reader: Reader) -> Generator[None, None, str]:
    """The JSON of a literal that ends before a comma or the closing parenthesis."""
    depth, at, quote = 0, 0, ""
    while True:
        text = reader.text
        while at < len(text):
            character = text[at]
            if quote:
                if character == "\\":
                    at += 1
                elif character == quote:
                    quote = ""
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}" or character == ",":
                if not depth:
                    return _as_json(reader.take(at))
                depth -= character != ","
            at += 1
        yield from reader.more()


def _as_json(text: str) -> str:
    try:
        tree = ast.parse(text.strip(), mode="eval")
        for node in ast.walk(tree):
            for name, value in ast.iter_fields(node):
                values = value if isinstance(value, list) else [value]
                for place, one in enumerate(values):
                    if isinstance(one, ast.Name) and one.id in _PYTHON_WORDS:
                        values[place] = ast.Constant(_PYTHON_WORDS[one.id])
                setattr(node, name, values if isinstance(value, list) else values[0])
        return json.dumps(ast.literal_eval(tree), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


_WORD_ENDS = re.compile(r"[,\]}]")


@frozen(kw_only=True)
class NotationCalls(Grammar):
    """``call:N{k:<|"|>text<|"|>,n:42}``: an object without quotes around keys."""

    prefix: str = "call:"
    quote: str
    """Stands around strings."""
    end: tuple[str, ...]

    def read(self, reader: Reader, calls: Calls, opener: str) -> Steps:
        yield from reader.expect(self.prefix)
        name, _ = yield from reader.until(alternatives("{"), ("{",), 256)
        call = calls.start(name.strip())
        ended = bool((yield from reader.literal("}")))
        while not ended:
            call.key((yield from self._key(reader)))
            yield from self._value(reader, call)
            ended = (yield from reader.expect(",", "}")) == "}"
        yield from reader.expect(*self.end)
        call.end()
        reader.forget()

    def _key(self, reader: Reader) -> Generator[None, None, str]:
        if (yield from reader.literal(self.quote)):
            key, _ = yield from reader.until(alternatives(self.quote), (self.quote,))
            yield from reader.expect(":")
            return key
        key, _ = yield from reader.until(alternatives(":"), (":",))
        return key.strip()

    def _value(self, reader: Reader, call: Call) -> Steps:
        found = yield from reader.literal(self.quote, "{", "[")
        if found == self.quote:
            call.arguments('"')
            yield from self._string(reader, call)
            call.arguments('"')
        elif found == "{":
            call.arguments("{")
            ended = bool((yield from reader.literal("}")))
            while not ended:
                key = yield from self._key(reader)
                call.arguments(json.dumps(key, ensure_ascii=False) + ": ")
                yield from self._value(reader, call)
                ended = (yield from reader.expect(",", "}")) == "}"
                call.arguments("" if ended else ", ")
            call.arguments("}")
        elif found == "[":
            call.arguments("[")
            ended = bool((yield from reader.literal("]")))
            while not ended:
                yield from self._value(reader, call)
                ended = (yield from reader.expect(",", "]")) == "]"
                call.arguments("" if ended else ", ")
            call.arguments("]")
        else:
            yield from self._word(reader, call)

    def _string(self, reader: Reader, call: Call) -> Steps:
        pattern = alternatives(self.quote)
        while True:
            match = reader.find(pattern)
            safe = reader.unfinished((self.quote,)) if match is None else match.start()
            if safe:
                call.arguments(json_text(reader.take(safe)))
            if match is not None:
                reader.take(len(self.quote))
                return
            yield from reader.more()

    def _word(self, reader: Reader, call: Call) -> Steps:
        while (match := _WORD_ENDS.search(reader.text)) is None:
            yield from reader.more()
        word = reader.take(match.start()).strip()
        try:
            reads_json(word)
        except Malformed:
            word = json.dumps(word, ensure_ascii=False)
        call.arguments(word)
