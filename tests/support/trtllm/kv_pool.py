"""The KV cache of one rank: what each byte must be, and whether it is."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha256, shake_256
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["BLOCK_TOKENS", "KvPool", "chain"]

BLOCK_TOKENS = 4
_LAYERS = 3
_TOKEN_BYTES = 24
"""Of one token, in one layer, for keys or values."""
_GAP = 16
"""Unused bytes between two regions of a slot."""


def chain(token_ids: list[int], salt: str | None) -> list[bytes]:
    """A digest for each position, of its token and all before."""
    state, digests = sha256(repr(salt).encode()).digest(), []
    for token in token_ids:
        state = sha256(state + token.to_bytes(8, "little")).digest()
        digests.append(state)
    return digests


class KvPool:
    """[blocks, layers, 2, tokens, bytes]; or slots of two regions, as the second manager has."""

    def __init__(self, blocks: int, rank: int, device: str) -> None:
        self._rank = rank
        piece = BLOCK_TOKENS * _TOKEN_BYTES
        self._half = _LAYERS * piece
        # The second manager's slots: keys of all layers, a gap, values, and another gap.
        self._raw = torch.zeros((blocks, 2 * (self._half + _GAP)), dtype=torch.uint8, device=device)
        self.tensor = torch.zeros((blocks, _LAYERS, 2, piece), dtype=torch.uint8, device=device)
        self.grouped = False

    def layout(self, window: int | None = None) -> Any:
        """As ``KvCacheLayout`` describes it."""
        self.grouped = True
        regions = tuple(
            SimpleNamespace(
                as_tensor=lambda start=start: self._raw[:, start : start + self._half],
                buffers=(role,),
            )
            for start, role in ((0, "key"), (self._half + _GAP, "value"))
        )
        group = SimpleNamespace(
            layer_group_id=0, window_size=window, regions=regions, replicated_regions=()
        )
        return SimpleNamespace(tokens_per_block=BLOCK_TOKENS, groups=(group,))

    def write(self, page: int, place: int, digest: bytes) -> None:
        """Compute a token's keys and values."""
        for view, want in zip(self._views(page, place), self._content(digest), strict=True):
            view.copy_(want)

    def holds(self, page: int, place: int, digest: bytes) -> bool:
        pairs = zip(self._views(page, place), self._content(digest), strict=True)
        return all(torch.equal(view.cpu(), want) for view, want in pairs)

    def scribble(self, page: int) -> None:
        self.tensor[page] = 0xEE
        self._raw[page] = 0xEE

    def _views(self, page: int, place: int) -> list[torch.Tensor]:
        """Keys, then values: [layers, bytes of a token]."""
        start = place * _TOKEN_BYTES
        if not self.grouped:
            both = self.tensor[page, :, :, start : start + _TOKEN_BYTES]
            return [both[:, 0], both[:, 1]]
        starts = (0, self._half + _GAP)
        halves = [self._raw[page, at : at + self._half].view(_LAYERS, -1) for at in starts]
        return [half[:, start : start + _TOKEN_BYTES] for half in halves]

    def _content(self, digest: bytes) -> list[torch.Tensor]:
        return _content(digest + bytes((self._rank,)))


@lru_cache(maxsize=4096)
def _content(name: bytes) -> list[torch.Tensor]:
    bytes_of = bytearray(shake_256(name).digest(2 * _LAYERS * _TOKEN_BYTES))
    return list(torch.frombuffer(bytes_of, dtype=torch.uint8).view(2, _LAYERS, -1))
