"""What strings arguments may be, as regular expressions: for models that write them bare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from commutator.contract.conversation import Tool
from commutator.errors import RequestError
from commutator_parsers.calls import types_of

DEPTH = 8
"""References that are followed from one to the next."""
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_FORMATS: Mapping[str, str] = {
    "date": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])",
    "date-time": (
        r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"
        r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][01][0-9]:[0-5][0-9])"
    ),
    "time": r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][01][0-9]:[0-5][0-9])",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[a-z0-9._+\-]{1,40}@[a-z0-9\-]{1,40}(\.[a-z]{2,12}){1,3}",
    "uri": r"[a-z]{2,12}:\/\/[a-zA-Z0-9\-._~\/?#=&%]{1,200}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
_NOT_OF_TEXT = {"not", "if", "then", "else", "contentEncoding", "contentMediaType"}


def texts_of(tool: Tool, key: str, schema: Any, depth: int = DEPTH) -> Iterator[str | list[str]]:
    """What strings an argument's schema allows: each one text, or expressions that all match.

    Raises RequestError for what no expression says.
    """
    if not depth:
        raise no_words(tool, key, "its references do not end")
    if schema is True:
        schema = {}
    if schema is False or "string" not in types_of(schema, tool.parameters):
        return
    if branches := _branches(tool, key, schema):
        for one in branches:
            yield from texts_of(tool, key, one, depth - 1)
        return
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if values is not None:
        yield from (one for one in values if isinstance(one, str))
        return
    for keyword in schema:
        if keyword in _NOT_OF_TEXT:
            raise no_words(tool, key, f"{keyword} cannot be enforced")
    yield [*_expressions(tool, key, schema)]


def _branches(tool: Tool, key: str, schema: Any) -> Sequence[Any]:
    """What a schema is one of, where it is by a reference or a combination."""
    if "$ref" in schema:
        return [resolved(tool, schema)]
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema:
            rest = {one: value for one, value in schema.items() if one != name}
            if name == "allOf" and len(schema[name]) > 1:
                raise no_words(tool, key, "allOf of texts cannot be enforced")
            return [{**rest, **one} for one in schema[name] if isinstance(one, Mapping)]
    return ()


def _expressions(tool: Tool, key: str, schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        yield f"(?s:.{{{least},{most}}})"
    else:
        yield "(?s:.*)"
    if "pattern" in schema:
        pattern = schema["pattern"]
        before = "" if pattern.startswith("^") else "(?s:.*)"
        after = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if after else inner.removesuffix("$")
        yield f"{before}({_in_slashes(inner)}){after}"
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise no_words(tool, key, f"format {schema['format']!r} cannot be enforced")
        yield _FORMATS[schema["format"]]


def _in_slashes(pattern: str) -> str:
    return re.sub(
        r"\\.|/", lambda one: "\\/" if one[0] == "/" else one[0], pattern, flags=re.DOTALL
    )


class NoWordsError(RequestError):
    """The refusal of a tool that a model cannot be made to call."""

    def __init__(self, why: str) -> None:
        """``why`` says what it has no words for."""
        super().__init__(
            f'tool_choice: this model cannot be made to call it: {why}; use "auto"',
            "tool_choice",
            "unsupported_parameter",
        )
        self.why = why


def no_words(tool: Tool, key: str, why: str) -> NoWordsError:
    """The refusal of ``tool``; ``key`` is that of an argument, if it is about one."""
    where = f"argument {key} of tool {tool.name}" if key else f"tool {tool.name}"
    return NoWordsError(f"{where}: {why} in the form that the model writes")


def resolved(tool: Tool, schema: Any) -> Any:
    """What a reference within the tool's parameters leads to. Raises RequestError."""
    reference = schema["$ref"]
    target: Any = tool.parameters
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise no_words(tool, "", f"$ref {reference!r} leads elsewhere")
    for step in reference[1:].split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")  # noqa: PLW2901
        target = target.get(step) if isinstance(target, Mapping) else None
        if target is None:
            raise no_words(tool, "", f"$ref {reference!r} leads nowhere")
    rest = {key: one for key, one in schema.items() if key != "$ref"}
    return {**target, **rest}
