"""Estimates how often each of many keys was seen recently, in a fixed amount of memory."""

from __future__ import annotations

import xxhash

__all__ = ["FrequencySketch"]

_ROWS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
_MOST = 15
_WIDEST = 1 << 22
_HALVE = bytes(value // 2 for value in range(256))
_CELLS_PER_KEY = 4
_SAMPLES_PER_KEY = 10
_WORD = (1 << 64) - 1


class FrequencySketch:
    """A count-min sketch: four rows of small counters, halved after ten additions per key.

    G. Einziger, R. Friedman and B. Manes, "TinyLFU", ACM Transactions on Storage 13 (2017).
    """

    def __init__(self, keys: int) -> None:
        width = 64
        while width < min(_CELLS_PER_KEY * keys, _WIDEST):
            width *= 2
        self._shift = 64 - (width.bit_length() - 1)
        self._rows = [bytearray(width) for _ in _ROWS]
        self._sample = _SAMPLES_PER_KEY * max(keys, 16)
        self._seen = 0

    def add(self, key: bytes) -> None:
        """Count one more occurrence of the key."""
        places = self._places(key)
        least = min(row[place] for row, place in zip(self._rows, places, strict=True))
        if least < _MOST:
            for row, place in zip(self._rows, places, strict=True):
                if row[place] == least:
                    row[place] = least + 1
        self._seen += 1
        if self._seen >= self._sample:
            self._rows = [row.translate(_HALVE) for row in self._rows]
            self._seen //= 2

    def of(self, key: bytes) -> int:
        """At least the true count, given the halvings, up to the limit of 15."""
        return min(row[p] for row, p in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: bytes) -> list[int]:
        number = xxhash.xxh3_64_intdigest(key)
        return [((number * odd) & _WORD) >> self._shift for odd in _ROWS]
