"""Where a text may be cut so that its parts, tokenized one by one, give the tokens of the whole.

A tokenizer works in stages, and a cut is exact when no stage looks across it:

1. Added tokens are found in the raw text, the leftmost and then the longest first. A cut is safe
   when no added token can lie across it.
2. What lies between them is normalized, split into words and looked up, each piece on its own. So
   a cut right before an added token is exact if that token can overlap with no other one.
3. Inside such a piece a cut is exact where the words are split anyway. All word patterns listed
   here take a letter only into a run that a space ends, or that the end of the text ends in the
   same way, and none looks back. So they split before a space that follows a letter, and neither
   side sees the difference. NFC leaves both sides alone too: nothing composes with a space.

Whatever is not known to behave so switches the cuts off, with the reason.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from attrs import frozen
from tokenizers import Tokenizer

__all__ = [
    "CutPoints",
    "WordTokens",
    "find_cut_points",
]

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


_OTHERS = r"\s*[\r\n]+|\s+(?!\S)|\s+"


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


_MARK = r"[^\r\n\p{L}\p{N}]?"


_CASED = rf"{_MARK}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_MARK}{_UPPER}+{_LOWER}*{_CONTRACTION}?"


_WORD_PATTERNS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Llama 3, Qwen 2 and 3: they differ in how many digits stay together
        *(
            rf"{_CONTRACTION}|{_MARK}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_OTHERS}"
            for digits in (r"\p{N}{1,3}", r"\p{N}")
        ),
        # GPT-4o, gpt-oss, Llama 4
        rf"{_CASED}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_OTHERS}",
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


# They take neither spaces nor the letters below. DeepSeek has both of them before its words.
_OTHER_PATTERNS = frozenset({r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"})


# Letters since Unicode 5.0, which NFC leaves as they are.
_LETTERS = "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u02af\u0388-\u038a\u038e-\u03a1\u03a3-\u03f5"


_LETTERS += "\u0400-\u0481\u048a-\u0513"


# The space stands first, so that it is what the text is searched for.
_SPACE_BETWEEN_LETTERS = re.compile(f" (?<=[{_LETTERS}] )(?=[{_LETTERS}])")


_SPACE_AFTER_LETTER = re.compile(f"[{_LETTERS}] ")


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

    before_tokens: re.Pattern[str] | None = None
    """Added tokens before which a cut is exact."""
    before_spaces: bool = False
    """Whether a cut before a space between two letters is exact."""
    first_ids: tuple[int, ...] = ()
    """Special tokens at the start of a text, when they are asked for."""
    last_ids: tuple[int, ...] = ()
    """Special tokens at the end of a text, when they are asked for."""
    problem: str | None = None
    """Why a text may not be cut at all, or only before some added tokens."""

    @property
    def any(self) -> bool:
        """Whether there is any place where a text may be cut."""
        return self.before_spaces or self.before_tokens is not None

    def next_cut(self, text: str, at_least: int) -> int | None:
        """The first known cut from ``at_least`` on; it depends on nothing behind it but one word.

        None when there is none.
        """
        end = len(text)
        space = _SPACE_BETWEEN_LETTERS.search(text, at_least) if self.before_spaces else None
        if space is not None:
            end = space.start()
        if self.before_tokens is not None:
            token = self.before_tokens.search(text, at_least, end)
            if token is not None:
                return token.start()
        return None if space is None else end

    def words(self, text: str) -> list[str]:
        """``text`` cut at every known cut; see ``before_spaces``, which must hold."""
        words: list[str] = []
        start = 0
        for token in self.before_tokens.finditer(text) if self.before_tokens else ():
            words += _cut_before_spaces(text[start : token.start()])
            start = token.start()
        return words + _cut_before_spaces(text[start:])

    def certain_at(self, text: str, cut: int) -> int:
        """A text that equals ``text`` up to here has its cut at ``cut`` too."""
        token = None if self.before_tokens is None else self.before_tokens.match(text, cut)
        return cut + len(" a") if token is None else token.end()


def _cut_before_spaces(text: str) -> list[str]:
    first, *others = _SPACE_BETWEEN_LETTERS.split(text)
    return [first, *[" " + word for word in others]]


def find_cut_points(tokenizer: Mapping[str, Any]) -> CutPoints:
    """``tokenizer`` is the content of a tokenizer.json."""
    normalizers = _steps(tokenizer.get("normalizer"), "normalizers")
    pre_tokenizers = _steps(tokenizer.get("pre_tokenizer"), "pretokenizers")
    added: Sequence[Mapping[str, Any]] = tokenizer.get("added_tokens") or ()
    around = _around(tokenizer.get("post_processor"))
    if around is None:
        return CutPoints(problem="its post-processor is of a kind not known here")
    if problem := _why_not(tokenizer, normalizers, pre_tokenizers, added):
        return CutPoints(problem=problem)
    contents = [token["content"] for token in added]
    # Without a normalizer, what is to be found in normalized text is found in raw text.
    raw = [token["content"] for token in added if not (normalizers and token["normalized"])]
    alone = sorted(_overlapping_none(raw, contents), key=len, reverse=True)
    problem = _why_not_before_spaces(normalizers, pre_tokenizers, contents)
    return CutPoints(
        before_tokens=re.compile("|".join(map(re.escape, alone))) if alone else None,
        before_spaces=problem is None,
        first_ids=around[0],
        last_ids=around[1],
        problem=problem,
    )


def _steps(stage: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [step for inner in stage[name] for step in _steps(inner, name)]


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


def _why_not_before_spaces(
    normalizers: Iterable[Mapping[str, Any]],
    pre_tokenizers: Iterable[Mapping[str, Any]],
    contents: Iterable[str],
) -> str | None:
    if any(step["type"] != "NFC" for step in normalizers):
        return "its normalizer may change spaces or letters"
    if any(step.get("add_prefix_space") for step in pre_tokenizers):
        return "its pre-tokenizer puts a space before every text"
    if not _splits_words(pre_tokenizers):
        return "its pre-tokenizer has no word pattern known here"
    for content in contents:
        # Tokens that are to be found in normalized text are normalized themselves.
        if any(map(_SPACE_AFTER_LETTER.search, (content, unicodedata.normalize("NFC", content)))):
            return f"its added token {content!r} may lie across a space"
    return None


def _splits_words(pre_tokenizers: Iterable[Mapping[str, Any]]) -> bool:
    for step in pre_tokenizers:
        pattern = _isolated(step)
        if step["type"] == "Digits" or pattern in _OTHER_PATTERNS:
            continue  # leaves letters and spaces together, and splits nothing else apart
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
        step for step in _steps(stage, "processors") if step["type"] != "ByteLevel"
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


_LONGEST_WORD = 32


# An entry with such a word in the widest letters and a token for each; most take half of it.
_ENTRY_BYTES = 800


class WordTokens:
    """Tokens by word. Only for tokenizers whose texts may be cut before spaces.

    Added tokens, such as those between messages, begin words of their own. A known word costs a
    twentieth of what it costs to tokenize it, an unknown one twice as much. Threads may share it.
    """

    def __init__(self, tokenizer: Tokenizer, cuts: CutPoints, max_bytes: int) -> None:
        """``cuts`` are the tokenizer's. When ``max_bytes`` are full it begins anew."""
        self._tokenizer = tokenizer
        self._cuts = cuts
        self._max_entries = max_bytes // _ENTRY_BYTES
        self._known: dict[str, list[int]] = {}

    @property
    def size_bytes(self) -> int:
        return _ENTRY_BYTES * len(self._known)

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, without special ones around it."""
        words = self._cuts.words(text)
        try:
            return list(chain.from_iterable(map(self._known.__getitem__, words)))
        except KeyError:
            return list(chain.from_iterable(self._learn(words)))

    def _learn(self, words: list[str]) -> list[list[int]]:
        known = self._known  # another thread may begin anew meanwhile
        missing = list({word: None for word in words if word not in known})
        encodings = self._tokenizer.encode_batch_fast(missing, add_special_tokens=False)
        learnt: dict[str, list[int]] = {}
        for word, encoding in zip(missing, encodings, strict=True):
            learnt[word] = encoding.ids
        tokens = [learnt[word] if word in learnt else known[word] for word in words]
        short = {word: ids for word, ids in learnt.items() if len(word) <= _LONGEST_WORD}
        if len(known) + len(short) > self._max_entries:
            self._known = {}
        if len(short) <= self._max_entries:
            self._known.update(short)
        return tokens
