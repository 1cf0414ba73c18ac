"""Where a text may be cut so that its parts, tokenized one by one, give the tokens of the whole.

A tokenizer works in stages, and a cut is exact when no stage looks across it:

1. Added tokens are found in the raw text, the leftmost and then the longest first. A cut is safe
   when no added token can lie across it.
2. What lies between them is normalized, split into words and looked up, each piece on its own. So
   a cut right before an added token is exact if that token can overlap with no other one.
3. Inside such a piece a cut is exact where the words are split anyway. The word patterns listed
   here do not look back, and none has a word in which a space follows what is no space, a sign
   follows a letter or a digit, or a letter and a digit stand side by side; and what ends before
   such a place ends there in the same way when nothing follows. NFC leaves both sides alone too:
   nothing composes with a space, sign or digit before it.

Whatever is not known to behave so switches the cuts off, with the reason.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_OTHERS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_MARK = r"[^\r\n\p{L}\p{N}]?"


def _cased(end: str) -> str:
    return rf"{_MARK}{_UPPER}*{_LOWER}+{end}|{_MARK}{_UPPER}+{_LOWER}*{end}"


def llama_words(digits: str) -> str:
    """The words of Llama 3, Qwen 2 and 3: they differ in how many digits stay together."""
    return rf"{_CONTRACTION}|{_MARK}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}"


_WORD_PATTERNS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        *(llama_words(digits) for digits in (r"\p{N}{1,3}", r"\p{N}")),
        # Qwen 3.5
        (
            rf"{_CONTRACTION}|{_MARK}[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_OTHERS}"
        ),
        # GPT-4o, gpt-oss, Llama 4
        rf"{_cased(_CONTRACTION + '?')}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}",
        # Mistral's Tekken
        rf"{_cased('')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}",
        # DeepSeek 3 and 4, which write line ends as they are
        (
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
            r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_OTHERS}"
        )
        .replace(r"\r", "\r")
        .replace(r"\n", "\n"),
    }
)

# They split digits and the letters below off. DeepSeek has both of them before its words.
_OTHER_PATTERNS = frozenset({r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})

# Letters since Unicode 5.0, which NFC leaves as they are: Latin, Greek, Cyrillic, Chinese, kana,
# Korean.
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0388-\u038a\u038e-\u03a1\u03a3-\u03f5"
_LETTERS += "\u0400-\u0481\u048a-\u0513\u4e00-\u9fa5\u3041-\u3094\u30a1-\u30fa\uac00-\ud7a3"

_LETTER_OR_DIGIT = re.compile(f"[0-9{_LETTERS}]")

# Not the apostrophe, with which words go on.
_SIGNS = '\n!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~'
_SIGNS += (
    "\u2026\u201c\u201d\u3001\u3002\u300a\u300b\u300c\u300d\u300e\u300f\u3010\u3011"
    "\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f"
)

_LETTER_BY_DIGIT = re.compile("[A-Za-z][0-9]|[0-9][A-Za-z]")

# Each of these treats one piece of text without regard to where it stood.
_NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Prepend",
    "Replace", "Strip", "StripAccents",
}  # fmt: skip

_PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Punctuation", "Split",
    "Whitespace", "WhitespaceSplit",
}  # fmt: skip

_MODELS = {"BPE", "WordLevel", "WordPiece"}


@frozen
class CutPoints:
    """Where texts of one tokenizer may be cut, and what it puts around a whole text."""

    pattern: re.Pattern[str] | None = None
    """A cut is exact before each of its matches; None: nowhere."""
    first_ids: tuple[int, ...] = ()
    """Special tokens at the start of a text, when they are asked for."""
    last_ids: tuple[int, ...] = ()
    """Special tokens at the end of a text, when they are asked for."""
    problem: str | None = None
    """Why a text may not be cut at all, or only before some added tokens."""

    def next_cut(self, text: str, at_least: int) -> int | None:
        """The first known cut from ``at_least`` on; None when there is none.

        It depends on the text before it, and on one character or added token behind it.
        """
        found = self.pattern.search(text, at_least) if self.pattern else None
        return None if found is None else found.start()

    def is_cut(self, text: str, at: int) -> bool:
        """Whether there is a known cut at ``at``."""
        return self.pattern is not None and self.pattern.match(text, at) is not None


def cut_points_of(tokenizer: Tokenizer) -> CutPoints:
    """Where texts of this tokenizer may be cut."""
    if tokenizer.encode_special_tokens:
        return CutPoints(problem="it reads special tokens as plain text")
    try:
        description = json.loads(tokenizer.to_str())
    except Exception as error:  # noqa: BLE001 - the library raises nothing more precise
        return CutPoints(problem=f"it cannot be described: {error}")
    return find_cut_points(description)


def find_cut_points(tokenizer: Mapping[str, Any]) -> CutPoints:
    """``tokenizer`` is the content of a tokenizer.json."""
    normalizers = steps_of(tokenizer.get("normalizer"), "normalizers")
    pre_tokenizers = steps_of(tokenizer.get("pre_tokenizer"), "pretokenizers")
    added: Sequence[Mapping[str, Any]] = tokenizer.get("added_tokens") or ()
    around = _around(tokenizer.get("post_processor"))
    if around is None:
        return CutPoints(problem="its post-processor is of a kind not known here")
    if problem := _why_not(tokenizer, normalizers, pre_tokenizers, added):
        return CutPoints(problem=problem)
    contents = [token["content"] for token in added]
    # Without a normalizer, what is to be found in normalized text is found in raw text.
    normalized = [token["content"] for token in added if normalizers and token["normalized"]]
    raw = [content for content in contents if content not in normalized]
    parts = _before_tokens(_overlapping_none(raw, contents))
    problem = _why_not_between_words(normalizers, pre_tokenizers, normalized)
    if problem is None:
        parts = _between_words(contents) + parts
    return CutPoints(
        pattern=re.compile("|".join(parts)) if parts else None,
        first_ids=around[0],
        last_ids=around[1],
        problem=problem,
    )


def _before_tokens(tokens: Iterable[str]) -> list[str]:
    """Patterns of the tokens, by first characters, so that few are tried at most places."""
    rests = defaultdict(list)
    for token in tokens:
        rests[token[0]].append(re.escape(token[1:]))
    return [f"{re.escape(first)}(?:{'|'.join(ends)})" for first, ends in rests.items()]


def _between_words(contents: Iterable[str]) -> list[str]:
    """Patterns of places where words end, except those that lie inside of an added token."""
    forms = [form for one in contents for form in (one, unicodedata.normalize("NFC", one))]
    pairs = {one[at : at + 2] for one in forms for at in range(len(one) - 1)}
    taken = {pair[1] for pair in pairs if _LETTER_OR_DIGIT.match(pair)}
    signs = "".join(re.escape(sign) for sign in _SIGNS if sign not in taken)
    # What is looked for stands first: only where it is found does the rest have to be tried.
    parts = [rf"[{signs}](?<=[0-9{_LETTERS}](?s:.))"] if signs else []
    if not any(re.fullmatch(r"\S ", pair) for pair in pairs):
        parts.insert(0, r" (?<=\S )")
    if not any(map(_LETTER_BY_DIGIT.fullmatch, pairs)):
        parts += ["[0-9](?<=[A-Za-z][0-9])", "[A-Za-z](?<=[0-9][A-Za-z])"]
    return parts


def steps_of(stage: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a stage of a tokenizer.json, whose sequences hold theirs under ``name``."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [step for inner in stage[name] for step in steps_of(inner, name)]


def _why_not(
    tokenizer: Mapping[str, Any],
    normalizers: Iterable[Mapping[str, Any]],
    pre_tokenizers: Iterable[Mapping[str, Any]],
    added: Iterable[Mapping[str, Any]],
) -> str | None:
    model = tokenizer["model"]
    if model.get("type") not in _MODELS or model.get("dropout"):
        return f"its model is {model.get('type')} with dropout {model.get('dropout')}"
    for step in normalizers:
        if step["type"] not in _NORMALIZERS:
            return f"its normalizer is {step['type']}"
    for step in pre_tokenizers:
        if step["type"] not in _PRE_TOKENIZERS:
            return f"its pre-tokenizer is {step['type']}"
    for token in added:
        if token["single_word"] or token["lstrip"] or token["rstrip"]:
            return f"its added token {token['content']!r} depends on what stands beside it"
    if tokenizer.get("truncation") or tokenizer.get("padding"):
        return "it truncates or pads"
    return None


def _why_not_between_words(
    normalizers: Iterable[Mapping[str, Any]],
    pre_tokenizers: Iterable[Mapping[str, Any]],
    normalized: Iterable[str],
) -> str | None:
    if any(step["type"] != "NFC" for step in normalizers):
        return "its normalizer may change spaces or letters"
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        return "its pre-tokenizer puts a space before every text"
    if not _splits_words(pre_tokenizers):
        return "its pre-tokenizer has no word pattern known here"
    for content in normalized:
        if not content.isascii():  # else it is not known what becomes it
            return f"its added token {content!r} is looked for in normalized text"
    return None


def _splits_words(pre_tokenizers: Iterable[Mapping[str, Any]]) -> bool:
    for step in pre_tokenizers:
        pattern = _isolated(step)
        if step["type"] == "Digits" or pattern in _OTHER_PATTERNS:
            continue  # keeps apart what the cuts are between, or leaves it
        if step["type"] == "ByteLevel":
            return bool(step.get("use_regex", True))
        return pattern in _WORD_PATTERNS
    return False


def _isolated(step: Mapping[str, Any]) -> str | None:
    """The regular expression whose matches this step makes pieces of their own."""
    if step["type"] != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern


def _overlapping_none(tokens: Iterable[str], others: Sequence[str]) -> list[str]:
    """Those of ``tokens`` of which no part can be a part of another one, or of a second itself."""
    starts = {other[:size] for other in others for size in range(1, len(other) + 1)}
    ends = {other[size:] for other in others for size in range(len(other))}
    return [
        token
        for token in tokens
        if token
        and not any(token[size:] in starts or token[:size] in ends for size in range(1, len(token)))
        and not any(other != token and (other in token or token in other) for other in others)
    ]


def _around(stage: Mapping[str, Any] | None) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Ids before and after a text; None when that is not known."""
    templates = [
        step for step in steps_of(stage, "processors") if step["type"] != "ByteLevel"
    ]  # which changes offsets only
    if not templates:
        return (), ()
    if len(templates) > 1 or templates[0]["type"] != "TemplateProcessing":
        return None
    ids: tuple[list[int], list[int]] = ([], [])
    after = 0
    for piece in templates[0]["single"]:
        if "Sequence" in piece:
            after += 1
        elif after <= 1:
            ids[after].extend(templates[0]["special_tokens"][piece["SpecialToken"]["id"]]["ids"])
    return (tuple(ids[0]), tuple(ids[1])) if after == 1 else None
