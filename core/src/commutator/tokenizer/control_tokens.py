"""Keeps text that clients wrote text: it never becomes a control token of the prompt.

A chat template writes control tokens, such as ``<|im_start|>``, into the same string as the texts
of a conversation, and the tokenizer finds them wherever they stand. So here the template's own ones
are *sealed* before it runs: in its constants each is replaced by secret characters. What
still looks like a control token in the rendered prompt was written by a client, or became one where
its texts were joined, cut or stripped.

Nearly always there is nothing like that: the seals are taken off, and the prompt is tokenized as
ever. Otherwise the sealed prompt goes to a double of the tokenizer that knows control tokens by
their seals alone, so that each of them is one, and the same characters elsewhere are ordinary text.

Some templates build control tokens, as ``<|`` and a role and ``|>``. What looks like one is told
apart by rendering once more, with marks in all that clients wrote: what still looks like one then
is the template's own.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from attrs import define, evolve, field, frozen
from jinja2 import nodes
from jinja2.environment import Environment
from jinja2.optimizer import optimize
from tokenizers import Tokenizer

from commutator.tokenizer.encoder import random_texts

_LIKELY = re.compile(
    r"<[|｜].+|.+[|｜]>|\[/?[A-Z_]+\]|</?[\w:]*(?:think|tool|func|arg)[\w:]*>"  # noqa: RUF001
)
"""Added tokens that are control tokens even if the vocabulary does not call them special."""
_REASONING = (
    ("<|channel>", "<channel|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
"""Markers of thoughts beside those like ``<think>`` and ``</think>``."""
_KEYWORDS = {
    "additionalProperties", "arguments", "content", "default", "description", "documents",
    "enum", "function", "id", "items", "name", "parameters", "properties", "reasoning",
    "reasoning_content", "required", "role", "text", "thinking", "title", "tool_call_id",
    "tool_calls", "tools", "type",
}  # fmt: skip
"""Keys that templates look for."""
_RARE = [chr(0xA0 + one) for one in (1, 2, 3, 6, 7, 9, 11, 12, 14, 16, 17, 22, 23, 27, 31, 87)]
"""Signs of one byte, which JSON, cases, trimming and normal forms leave alone."""
_SECRET = 13
"""Characters in a seal: too many to guess."""
_MARK = 3
_PROBES = 300
_ASCII = "".join(map(chr, range(0x21, 0x7F)))


@define(eq=False)  # made for each request, and a frozen class takes twice as long to fill
class RenderedPrompt:
    """A conversation as the model's chat template writes it."""

    text: str
    sealed: str | None = None
    """Set where clients wrote what looks like a control token: ``text`` for the double."""
    controls: ControlTokens | None = None

    def followed_by(self, text: str) -> RenderedPrompt:
        """With more text, whose control tokens are ones."""
        if not text:
            return self
        if self.sealed is None or self.controls is None:
            return evolve(self, text=self.text + text)
        sealed = self.sealed + self.controls.seal(text)
        return evolve(self, text=self.text + text, sealed=sealed)


@frozen
class _Marks:
    """Put into what clients wrote."""

    mark: str
    firsts: str
    """What control tokens begin with."""
    like: frozenset[str]
    """The control tokens that are looked for."""
    ends: tuple[str, ...] = field(init=False)

    @ends.default
    def _all_ends(self) -> tuple[str, ...]:
        return tuple({one[at:] for one in self.like for at in range(1, len(one))})

    def put(self, value: Any, key: str = "") -> Any:
        """``value`` with marks; ``key`` is where it was."""
        if isinstance(value, str):
            return self._in_text(value, whole=key != "type")
        if isinstance(value, Mapping):
            given = key == "arguments"  # down to its depths
            known = () if given or key == "properties" else _KEYWORDS
            return {
                self._in_text(name, whole=name not in known): self.put(one, key if given else name)
                for name, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.put(one, key) for one in value]
        return value

    def _in_text(self, text: str, *, whole: bool) -> str:
        """``whole``: also where the template may have written what a control token begins with."""
        marked = text
        for first in self.firsts:
            marked = marked.replace(first, first + self.mark)
        bare = text.strip() if whole else ""
        if bare and (bare.startswith(self.ends) or any(bare in one for one in self.like)):
            start = len(text) - len(text.lstrip())
            return marked[:start] + self.mark + marked[start:]
        return marked


class ControlTokens:
    """The control tokens of one tokenizer and chat template. Threads may share it.

    They are the added tokens that are special, that the template mentions, or that look like it.
    """

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        template: nodes.Template,
        environment: Environment,
        values: Iterable[str],
    ) -> ControlTokens:
        """Those of a parsed template, which from then on has seals in its place of them.

        ``values`` are those of its variables that are no client's.
        """
        optimize(template, environment)  # joins constants
        data, constants = (
            [*template.find_all(nodes.TemplateData)],
            [*template.find_all(nodes.Const)],
        )
        texts = [*(one.data for one in data), *(str(one.value) for one in constants), *values]
        made = cls(tokenizer, "\n".join(texts))
        for one in data:
            one.data = made.seal(one.data)
        for constant in constants:
            constant.value = made._sealed(constant.value)
        return made

    def __init__(self, tokenizer: Tokenizer, mentioned: str) -> None:
        """``mentioned`` is all text in the template."""
        added = tokenizer.get_added_tokens_decoder().values()
        tokens = [one for one in added if _is_control(one.content, one.special, mentioned)]
        self._tokenizer = tokenizer
        self.texts = frozenset(one.content for one in tokens)
        """As the tokenizer knows them."""
        self._mentioned = frozenset(one for one in self.texts if one in mentioned)
        draw = random.SystemRandom()
        signs = [sign for sign in _RARE if not any(sign in one for one in self.texts)]
        self._lead = draw.choice(signs)  # no constant, so that nobody can write many of them
        secrets = {"".join(draw.choices(signs, k=_SECRET)) for _ in range(2 * len(self.texts) + 9)}
        self._mark = self._lead + secrets.pop()[:_MARK]
        """Put into what clients wrote. Who guesses it takes characters from his own text."""
        self._opened = dict(zip(secrets, self.texts, strict=False))
        """Control tokens by their seals without the lead."""
        self._seals = {text: self._lead + secret for secret, text in self._opened.items()}
        self._raw = re.compile(_any_of(self.texts) if self.texts else r"(?!)")
        self._firsts = "".join({one[0] for one in self.texts})
        self._normalizer = tokenizer.normalizer if any(one.normalized for one in tokens) else None
        normalized = "" if self._normalizer is None else self._normalizer.normalize_str(_ASCII)
        self._normalizes_ascii = not normalized.endswith(_ASCII)
        closing = {one: one[0] + "/" + one[1:] for one in self.texts if "think" in one.lower()}
        pairs = (*closing.items(), *_REASONING)
        self._reasoning = [pair for pair in pairs if self.texts.issuperset(pair)]

    def seal(self, text: str) -> str:
        """``text`` with all its control tokens sealed."""
        return self._raw.sub(lambda found: self._seals[found[0]], text)

    def _is_read(self, sealed: str, plain: str) -> bool:
        """Whether the tokenizer would find a control token that is not sealed.

        ``plain`` is the text without seals. A control token may come about in normalized text.
        """
        for first in self._firsts:
            if first in sealed:
                if self._raw.search(sealed):
                    return True
                break
        if self._normalizer is None or (plain.isascii() and not self._normalizes_ascii):
            return False
        return self._raw.search(self._normalizer.normalize_str(sealed)) is not None

    def unseal(self, text: str) -> str:
        """``text`` with the control tokens in place of their seals."""
        lead, opened, find = self._lead, self._opened, text.find
        parts: list[str] = []
        start, at = 0, find(lead)  # three times as quick as a regular expression
        while at >= 0:
            end = at + 1 + _SECRET
            control = opened.get(text[at + 1 : end])
            if control is None:
                at = find(lead, at + 1)
            else:
                parts += text[start:at], control
                start, at = end, find(lead, end)
        return "".join((*parts, text[start:])) if parts else text

    def _sealed(self, value: Any) -> Any:
        if isinstance(value, str):
            return type(value)(self.seal(value))  # it may be safe markup
        if isinstance(value, list | tuple):
            return type(value)(map(self._sealed, value))
        if isinstance(value, dict):
            return {self._sealed(key): self._sealed(one) for key, one in value.items()}
        return value

    # ----------------------------------------------------------- conversations

    def prompt(
        self,
        write: Callable[[Sequence[Mapping[str, Any]], Mapping[str, Any]], str],
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
    ) -> RenderedPrompt:
        """What ``write``, the template, makes of messages and variables."""
        known = messages
        if self._reasoning:
            known = [
                self._with_reasoning(one) if one["role"] == "assistant" else one for one in messages
            ]
        text = write(known, variables)
        plain = RenderedPrompt(self.unseal(text))
        if not self._is_read(text, plain.text):
            return plain
        built = frozenset(self._raw.findall(text))  # perhaps, by the template
        marks = _Marks(self._mark, self._firsts, built)
        marked = [self._marked(message, marks) for message in messages]
        put = {name: marks.put(value, name) for name, value in variables.items()}
        if built and (marked, put) != (known, variables):
            text = write(marked, put)
        sealed = self._raw.sub(
            lambda found: self._seals[found[0]] if found[0] in built else found[0], text
        )
        sealed = sealed.replace(self._mark, "")
        guarded = RenderedPrompt(self.unseal(sealed), sealed, self)
        if guarded.text == plain.text and not self._is_read(sealed, plain.text):
            return plain
        return guarded

    def _with_reasoning(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message, its markers sealed around the thoughts that an answer began with.

        Templates look for them.
        """
        content = message["content"]
        if not isinstance(content, str):
            return message
        parts = (
            self._marker(part) if is_marker else part
            for part, is_marker in self._around_thoughts(content)
        )
        return {**message, "content": "".join(parts)}

    def _marked(self, message: Mapping[str, Any], marks: _Marks) -> Mapping[str, Any]:
        found: dict[str, Any] = {**marks.put(message), "role": message["role"]}
        content = message["content"]
        if message["role"] == "assistant" and isinstance(content, str):
            parts = (
                self._marker(part) if is_marker else marks.put(part)
                for part, is_marker in self._around_thoughts(content)
            )
            found["content"] = "".join(parts)
        return found

    def _marker(self, text: str) -> str:
        return self._seals[text] if text in self._mentioned else text

    def _around_thoughts(self, content: str) -> Iterator[tuple[str, bool]]:
        """The parts of ``content``, and whether they are markers of the thoughts it begins with."""
        for begin, end in self._reasoning:
            before, found, after = content.partition(begin)
            if found and not before.strip():
                yield before, False
                yield begin, True
                content = after
            thoughts, closed, after = content.partition(end)
            if closed:
                yield thoughts, False
                yield end, True
                content = after
            if (found and not before.strip()) or closed:
                break
        yield content, False

    # --------------------------------------------------------------- tokenizer

    @cached_property
    def double(self) -> tuple[Tokenizer | None, str | None]:
        """The tokenizer that knows control tokens by their seals, or why there is none."""
        try:
            double = Tokenizer.from_str(json.dumps(self._renamed()))
        except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
            return None, f"it cannot be described: {error}"
        for text in random_texts(self._tokenizer, _PROBES):
            sealed = self.seal(text)
            if self._is_read(sealed, text):  # in its normalized form
                continue
            expected = self._tokenizer.encode(text, add_special_tokens=False).ids
            if double.encode(sealed, add_special_tokens=False).ids != expected:
                return None, f"its double gives other tokens for {text!r:.100}"
        return double, None

    def _renamed(self) -> dict[str, Any]:
        """A tokenizer.json in which each control token is called by its seal, with the same id."""
        seals = self._seals
        described: dict[str, Any] = json.loads(self._tokenizer.to_str())
        for token in described["added_tokens"]:
            token["content"] = seals.get(token["content"], token["content"])
        model = described["model"]
        vocabulary = model.get("vocab")
        if isinstance(vocabulary, dict):
            model["vocab"] = {seals.get(text, text): one for text, one in vocabulary.items()}
        elif vocabulary:
            model["vocab"] = [[seals.get(text, text), *rest] for text, *rest in vocabulary]
        if "merges" in model:
            pairs = map(_pair, model["merges"])
            model["merges"] = [one for one in pairs if not seals.keys() & {*one, "".join(one)}]
        if model.get("unk_token") in seals:
            model["unk_token"] = seals[model["unk_token"]]
        return described


def _pair(merge: str | list[str]) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


def _is_control(text: str, special: bool, mentioned: str) -> bool:
    if len(text) <= 1 or text.isspace():
        return False
    is_sign = not (text[0].isalnum() or text[0].isspace())
    return special or _LIKELY.fullmatch(text) is not None or (is_sign and text in mentioned)


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of the texts, the longest first, that tries few of them at each place."""
    branches: dict[str, list[str]] = {}
    for text in texts:
        branches.setdefault(text[:1], []).append(text[1:])
    whole = branches.pop("", None) is not None
    parts = []
    for first, rests in branches.items():
        single = len(rests) == 1
        parts.append(re.escape(first) + (re.escape(rests[0]) if single else _any_of(rests)))
    if not parts:
        return ""
    group = f"(?:{'|'.join(parts)})" if len(parts) > 1 or whole else parts[0]
    return group + "?" if whole else group
