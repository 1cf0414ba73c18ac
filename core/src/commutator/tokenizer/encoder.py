"""Text to token ids: by fastokens as long as it gives the ids of tokenizers, else by tokenizers.

What counts is what ``tokenizers`` answers: models are trained and engines run with it. fastokens,
which is several times as fast, has to prove itself on random texts when a model is loaded, and then
on samples of what is served (see ``PromptTokenCache``). The first difference ends its use for good,
with a warning. A text that it cannot tokenize is left to ``tokenizers``.

Neither can be interrupted: a character takes ``tokenizers`` up to two microseconds, fastokens up to
half of one. So they are given texts of bounded length only.
"""

from __future__ import annotations

import json
import logging
import os
import random
import sys
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

from attrs import frozen
from tokenizers import Tokenizer

from commutator.errors import RequestError

log = logging.getLogger(__name__)


class TokenIds(NamedTuple):
    """The token ids of several texts, without an object for each id."""

    data: bytes
    """32-bit integers in the machine's byte order, text after text."""
    offsets: Sequence[int]
    """The index of each text's first id, and the number of all ids."""

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]]) -> TokenIds:
        """Those of texts that have these ids."""
        offsets = list(accumulate(map(len, ids), initial=0))
        return cls(array("I", chain.from_iterable(ids)).tobytes(), offsets)

    @classmethod
    def joined(cls, parts: Sequence[TokenIds]) -> TokenIds:
        """Those of the texts of all parts."""
        if len(parts) == 1:
            return parts[0]
        offsets = [0]
        for part in parts:
            before = offsets[-1]
            offsets += [before + end for end in part.offsets[1:]]
        return cls(b"".join(part.data for part in parts), offsets)


FastEncode = Callable[[Sequence[str], bool], TokenIds]
"""Of (texts, whether special tokens are put around each), the token ids.

Raises ValueError for texts that it cannot tokenize, and lets other threads run while it works.
"""

LONGEST_EXACT = 600_000
"""Characters that ``tokenizers`` gets at a time: about a second of its work at worst."""
LONGEST_FAST = 2_000_000
"""The same for fastokens."""

_PROBES = 300
# fastokens cuts texts of this size into parts, which it tokenizes one by one.
_LONG_PROBE_CHARACTERS = 50_000


@frozen
class FastTokenizer:
    """The fast double of a tokenizer, or why there is none."""

    encode: FastEncode | None
    problem: str | None = None
    differs: bool = False
    """Whether there is none because it gave other tokens."""

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, make: Callable[[Tokenizer], FastEncode] | None = None
    ) -> FastTokenizer:
        """That of ``tokenizer``, proven on random texts, in a fraction of a second.

        ``make`` is ``fastokens_encode`` by default; like it, it raises ValueError when it cannot
        serve this tokenizer.
        """
        try:
            encode = (make or fastokens_encode)(tokenizer)
        except ValueError as error:
            return cls(None, str(error))
        exact = Encoder(tokenizer, cls(None))

        def differs(text: str) -> bool | None:
            """None when it cannot be tokenized; then it is left to ``tokenizer``."""
            try:
                ours = encode([text], True)
            except ValueError:
                return None
            return ours.data != exact.encode([text], add_special_tokens=True).data

        try:
            verdicts = {text: differs(text) for text in ("", *random_texts(tokenizer, _PROBES))}
            known = [text for text, verdict in verdicts.items() if verdict is not None]
            if len(known) <= len(verdicts) / 2:
                return cls(None, f"fastokens can tokenize {len(known)} of {len(verdicts)} texts")
            long = "\n".join(known * (1 + _LONG_PROBE_CHARACTERS // len("".join(known))))
            verdicts[long] = differs(long)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # noqa: BLE001 - a panic of Rust code is no Exception
            return cls(None, f"fastokens failed: {error!r:.200}", differs=True)
        if wrong := sum(verdict or False for verdict in verdicts.values()):
            problem = f"fastokens gives {wrong} of {len(verdicts)} random texts other tokens"
            return cls(None, problem, differs=True)
        return cls(encode)


class Encoder:
    """Token ids of texts, always those of ``tokenizer``. Threads may share it.

    Other threads run while it works.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        fast: FastTokenizer,
        *,
        name: str = "",
        on_difference: Callable[[], None] = lambda: None,
    ) -> None:
        """``fast`` is that of ``tokenizer``, which neither truncates nor pads.

        ``name`` is the model's, for the log. ``on_difference`` is called when the fast one was
        found to give other tokens.
        """
        self._tokenizer = tokenizer
        self._fast = fast.encode
        self._name = name
        self._on_difference = on_difference
        if fast.differs:
            self.give_way(fast.problem or "")
        elif fast.problem:
            log.info("model %s: tokenizers tokenizes its prompts: %s", name, fast.problem)

    @property
    def is_fast(self) -> bool:
        """Whether the fast tokenizer is in use."""
        return self._fast is not None

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> TokenIds:
        """The token ids of the texts.

        Raises RequestError for a text that is too long for the one that has to tokenize it.
        """
        if self._fast is not None:
            _check_lengths(texts, LONGEST_FAST)
            try:
                return self._fast(texts, add_special_tokens)
            except ValueError as error:
                if len(texts) > 1:  # one of them
                    return TokenIds.joined(
                        [
                            self.encode([text], add_special_tokens=add_special_tokens)
                            for text in texts
                        ]
                    )
                log.debug("model %s: left to tokenizers: %s", self._name, error)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # noqa: BLE001 - a panic of Rust code is no Exception
                self.give_way(f"fastokens failed: {error!r:.200}")
        return self.encode_exactly(texts, add_special_tokens=add_special_tokens)

    def encode_exactly(self, texts: Sequence[str], *, add_special_tokens: bool) -> TokenIds:
        """The same, by ``tokenizer`` itself. Raises RequestError for a text that is too long."""
        _check_lengths(texts, LONGEST_EXACT)
        # Unlike encode(), the batch form gives up the interpreter lock, and it is quicker.
        encodings = self._tokenizer.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
        return TokenIds.of([encoding.ids for encoding in encodings])

    def give_way(self, why: str) -> None:
        """Use ``tokenizer`` alone from now on; ``why`` is for the log."""
        self._fast = None
        self._on_difference()
        log.warning(
            "model %s: from now on tokenizers alone tokenizes its prompts, which takes several "
            "times as long: %s; please report it with the model's tokenizer",
            self._name,
            why,
        )


def _check_lengths(texts: Sequence[str], most: int) -> None:
    longest = max(map(len, texts), default=0)
    if longest > most:
        raise RequestError(
            f"prompt: in {longest} of its characters there is no place where this model's "
            f"tokenizer is known to split, and it is given at most {most} at a time: send a "
            "shorter prompt, one with spaces and line ends, or token ids",
            "prompt",
            "prompt_not_divisible",
        )


def fastokens_encode(tokenizer: Tokenizer) -> FastEncode:
    """Raises ValueError when fastokens is not installed or cannot serve this tokenizer."""
    # A front door has a thread for each long prompt; more of them would take its siblings' cores.
    os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
    try:
        from fastokens import Tokenizer as Fastokens
    except ImportError as error:
        raise ValueError(f"fastokens is not installed ({error})") from error
    if sys.byteorder != "little":
        raise ValueError("it gives ids as little-endian integers, which this machine does not use")
    if tokenizer.encode_special_tokens:
        raise ValueError("it reads special tokens as plain text")
    try:
        description = json.loads(tokenizer.to_str())
    except Exception as error:  # the library raises nothing more precise
        raise ValueError(f"it cannot be described: {error}") from error
    if problem := _not_honoured(description):
        raise ValueError(f"fastokens does not support {problem}")
    description["pre_tokenizer"] = _in_one_step(description["pre_tokenizer"])
    fast = Fastokens.from_json_str(json.dumps(description))

    def encode(texts: Sequence[str], add_special_tokens: bool) -> TokenIds:
        data, offsets = fast.encode_batch_flat(list(texts), add_special_tokens)
        return TokenIds(data, memoryview(offsets).cast("Q"))

    return encode


def _not_honoured(description: Mapping[str, Any]) -> str | None:
    """What fastokens reads in a tokenizer.json and then ignores."""
    model = description["model"]
    if model.get("type") != "BPE":
        return f"the model {model.get('type')}"
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option):
            return f"{option} of its model"
    for token in description.get("added_tokens") or ():
        if token["single_word"]:
            return f"its added token {token['content']!r}, which must be a word of its own"
    for option in ("truncation", "padding"):
        if description.get(option):
            return option
    return None


_DIGITS_THEN_GPT2 = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
)


def _in_one_step(pre_tokenizer: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """One pattern in place of two steps: each digit alone, then the words of GPT-2.

    SmolLM and StarCoder have them. fastokens does the same with one pattern in a third of the time.
    Space before a digit is a word as a whole, as at the end of a text.
    """
    match pre_tokenizer:
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True} as byte_level,
            ],
        }:
            pattern = {"Regex": _DIGITS_THEN_GPT2}
            split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
            steps = [split, {**byte_level, "use_regex": False}]
            return {"type": "Sequence", "pretokenizers": steps}
    return pre_tokenizer


_SCRIPTS = (
    (0x20, 0x7F), (0x20, 0x7F), (0x20, 0x7F), (0x00, 0x20), (0x80, 0x250), (0x250, 0x370),
    (0x370, 0x530), (0x590, 0x780), (0x900, 0xE00), (0xE00, 0xF00), (0x1100, 0x1200),
    (0x1E00, 0x2000), (0x2000, 0x2070), (0x2070, 0x2C00), (0x3000, 0x3100), (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A4), (0xE000, 0xE010), (0xF900, 0xFB00), (0xFB50, 0x10000), (0x10000, 0x10400),
    (0x1D400, 0x1D800), (0x1F1E6, 0x1F200), (0x1F300, 0x1FB00), (0x20000, 0x20100),
    (0xE0000, 0xE01F0), (0, 0xD800), (0xE000, 0x110000),
)  # fmt: skip
_PIECES = (
    " ", " ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u00a0", "\u3000", "\u2028",
    "the", "The", " of", "isn't", "DON'T", "they'll", "'S", "\u2019s", "camelCase", "HTTPServer",
    "0", "7", "42", "2026", "1234567", "3.14", "x1", "v2.0", "\u0663", "\u00b2", "\u2167",
    "...", "?!", "(", ")", '{"', '": [', "],", "://", "==", "->", "#", "//", "_", "__init__", "$",
    "\u00e9", "e\u0301", "\u0301", "\ufb01", "\u017f", "\u00df", "\u212a", "\u1e9b\u0323",
    "\u0434\u043e\u043c", "\u4e2d\u6587", "\u3002", "\uff0c", "\u304b\u3099", "\uac01",
    "\u1100\u1161", "\u0e01\u0e34", "\u0915\u094d\u0937", "\u0645\u0631\u062d\u0628\u0627",
    "\U0001f600", "\U0001f468\u200d\U0001f469", "\u2581", "\u0120", "<0x41>", "\ufeff", "\x00",
)  # fmt: skip


def random_texts(tokenizer: Tokenizer, count: int, seed: int = 0) -> Iterator[str]:
    """Texts of 1 to 40 pieces that tokenizers may disagree on; the same ones for the same seed.

    Pieces are characters of many scripts, words, signs, tokens of the vocabulary, and added tokens,
    whole or damaged.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    added = [token.content for token in tokenizer.get_added_tokens_decoder().values()] or ["<s>"]
    vocabulary = tokenizer.get_vocab_size()

    def of_script() -> str:
        script = chance.choice(_SCRIPTS)
        return "".join(chr(chance.randrange(*script)) for _ in range(chance.randint(1, 6)))

    def of_vocabulary() -> str:
        return tokenizer.decode([chance.randrange(vocabulary)], skip_special_tokens=False)

    def damaged() -> str:
        token = chance.choice(added)
        cut = chance.randrange(len(token) + 1)
        return chance.choice((token[:cut], token[cut:]))

    def one_of(texts: Sequence[str]) -> Callable[[], str]:
        return lambda: chance.choice(texts)

    makers = (one_of(_PIECES), of_script, of_vocabulary, one_of(added), damaged)
    for _ in range(count):
        chosen = chance.choices(makers, weights=(8, 6, 4, 1, 1), k=chance.randint(1, 40))
        yield "".join(make() for make in chosen)
