"""What clients send beside the fields that are served: set aside, named, or refused.

Only a body that the quick converter refuses comes here. Null stands for a default wherever there is
one. Of fields that no class has, those with neutral values are as good as none. Others are ignored
and named, unless what they ask for would change the answer: those are refused, or left to an engine
that may know them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, get_args, get_type_hints

import attrs
from attrs import frozen

from commutator_openai.fields import Off
from commutator_openai.requests import BatchRequest, ChatRequest, CompletionRequest

IGNORED_HEADER = "X-Commutator-Ignored"
"""Names the parameters that had no effect on the answer."""

_NAMED = 32
_NAME = re.compile(r"[A-Za-z0-9_.\-]{1,64}")

_SAMPLING = "it would change the answer, and is not served here"
_ANSWER = "the answer would not have it"
_WITHOUT = (None, False)

_NOT_SERVED: Mapping[str, Off] = {
    "use_beam_search": Off("there is no beam search", _WITHOUT),
    "length_penalty": Off("there is no beam search", (None, 1, 1.0)),
    "spaces_between_special_tokens": Off(_SAMPLING, (None, True)),
    "return_prompt_text": Off(_ANSWER, _WITHOUT),
    "stream_interval": Off("chunks are sent as they come", (None, 1)),
    "repetition_detection": Off(_SAMPLING, (None, {})),
    "thinking_token_budget": Off(_SAMPLING),
    "thinking": Off("say it by chat_template_kwargs", (None, {})),
    "watermarking": Off(_SAMPLING, (None, False, {})),
    "media_io_kwargs": Off("only text is served", (None, {})),
    "mm_processor_kwargs": Off("only text is served", (None, {})),
    "logits_processors": Off(_SAMPLING, (None, [])),
}
"""Fields of neither class whose loss would make an answer wrong, but for these values."""

_NOT_SERVED_BY: Mapping[type[Any], Mapping[str, Off]] = {
    ChatRequest: {
        **_NOT_SERVED,
        "add_special_tokens": Off("the chat template has them", _WITHOUT),
    },
    CompletionRequest: {
        **_NOT_SERVED,
        "add_special_tokens": Off("send token ids instead", (None, True)),
    },
}

_NOT_SERVED_BY = {**_NOT_SERVED_BY, BatchRequest: _NOT_SERVED_BY[ChatRequest]}

_NOT_ALLOWED: Mapping[str, str] = {
    "chat_template": "the template is the model's; the operator sets it by `chat_template`",
    "kv_transfer_params": "only the front door moves KV blocks",
    "ec_transfer_params": "only the front door moves KV blocks",
    "disaggregated_params": "only the front door moves KV blocks",
    "bootstrap_host": "only the front door moves KV blocks",
    "bootstrap_port": "only the front door moves KV blocks",
    "bootstrap_room": "only the front door moves KV blocks",
    "prompt_embeds": "prompts are texts or token ids",
    "rid": "requests are named by the header X-Request-Id",
    "vllm_xargs": "engine_options has what clients may ask of an engine",
}
"""What engines know and no client may say, and why."""


@frozen
class Leftovers:
    """What was found beside the fields that are served."""

    changed: bool
    """Whether something was taken out of the body."""
    ignored: tuple[str, ...]
    """Paths without numbers, such as "messages.createdAt"; each once."""
    refused: tuple[tuple[str, str], ...]
    """Names, and what is wrong with them."""


def set_aside(body: dict[str, Any], cls: Any, *, strict: bool) -> Leftovers:
    """Take out of ``body``, in place, what ``cls`` and the classes in it need not see.

    ``strict`` leaves unknown fields with a meaning in it, so that they are refused.
    """
    refused = []
    for name in [name for name in body if name not in _fields(cls)]:
        value, not_served = body[name], _NOT_SERVED_BY.get(cls, {}).get(name)
        if name in _NOT_ALLOWED and value not in (None, []):
            refused.append((name, f"not allowed: {_NOT_ALLOWED[name]}; leave it out"))
        elif not_served is not None:
            try:
                not_served.convert(value)
            except ValueError as error:
                refused.append((name, str(error)))
        else:
            continue
        del body[name]
    ignored: dict[str, None] = {}
    changed = bool(refused)
    for taken in _take_out(body, cls, "", strict):
        changed = True
        if taken:
            ignored.setdefault(taken)
    return Leftovers(changed, tuple(ignored), tuple(refused))


def for_engine(body: Mapping[str, Any], cls: Any) -> tuple[dict[str, Any], list[str]]:
    """What an engine gets that is asked as clients ask; and what is kept from it and named.

    Engines have fields that no client may use, so only known ones are passed.
    """
    known = _fields(cls).keys() | _NOT_SERVED_BY.get(cls, {}).keys()
    passed = {name: value for name, value in body.items() if name in known}
    return passed, [
        name for name, value in body.items() if name not in known and not _is_neutral(value)
    ]


def ignored_header(names: list[str] | tuple[str, ...]) -> str:
    """The value of ``IGNORED_HEADER``, whatever the client called its fields."""
    shown = [name if _NAME.fullmatch(name) else "?" for name in names[:_NAMED]]
    return ", ".join(dict.fromkeys(shown))


def _take_out(value: dict[str, Any], cls: Any, path: str, strict: bool) -> Iterator[str]:
    """The path of each field that is ignored; "" for one that says nothing."""
    fields = _fields(cls)
    for name in list(value):
        inner = value[name]
        if name not in fields:
            neutral = _is_neutral(inner)
            if neutral or not strict:
                del value[name]
                yield "" if neutral else f"{path}{name}"
            continue
        has_default, nested = fields[name]
        if inner is None and has_default:
            del value[name]
            yield ""
        elif nested is not None:
            for one in _objects_in(inner):
                yield from _take_out(one, nested, f"{path}{name}.", strict)


def _objects_in(value: Any) -> Iterator[dict[str, Any]]:
    """``value`` itself, or what is in its list, or in the lists of that."""
    if isinstance(value, dict):
        yield value
    for one in value if isinstance(value, list) else ():
        yield from _objects_in(one)


def _is_neutral(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


@cache
def _fields(cls: Any) -> Mapping[str, tuple[bool, type[Any] | None]]:
    """By name, whether a field has a default, and the class of what is in it."""
    kinds = get_type_hints(cls, include_extras=True)
    return {
        one.name: (one.default is not attrs.NOTHING, _class_in(kinds[one.name]))
        for one in attrs.fields(cls)
    }


def _class_in(kind: Any) -> type[Any] | None:
    if isinstance(kind, type) and attrs.has(kind):
        return kind
    return next((found for one in get_args(kind) if (found := _class_in(one)) is not None), None)
