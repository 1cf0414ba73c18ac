"""Finds stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopMatcher"]


class StopMatcher:
    """Passes text on until a stop string appears.

    The match that ends first wins, among equal ends the longest, so that the result does not
    depend on how the text was cut. Text is held back only while it may still become a match.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """``include_stop`` keeps the stop string itself in the text. Stops are not empty."""
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found; from then on nothing more is passed on."""

    def push(self, text: str) -> str:
        """The text that is now certain to belong to the answer."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if found := self._earliest(text):
            end, stop = found
            self._held, self.matched = "", stop
            return text[: end if self._include_stop else end - len(stop)]
        keep = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[keep:]
        return text[:keep]

    def flush(self) -> str:
        """The text held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _earliest(self, text: str) -> tuple[int, str] | None:
        """(end, stop string) of the match that ends first."""
        found = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := text.find(stop)) >= 0
        ]
        if not found:
            return None
        end, _, stop = min(found)
        return end, stop


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning, not the whole, of ``stop``."""
    last = text[-1:]
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if stop[length - 1] == last and text.endswith(stop[:length]):
            return length
    return 0
