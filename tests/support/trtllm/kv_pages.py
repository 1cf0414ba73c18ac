"""The pages of a KV cache: who uses them, and which blocks they hold for reuse."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tests.support.trtllm.kv_pool import BLOCK_TOKENS

__all__ = ["Pages"]


class Pages:
    """One numbering for all ranks. A block is named by the digest of its last token."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._users: Counter[int] = Counter()
        self._cached: OrderedDict[bytes, int] = OrderedDict()

    def match(self, digests: Sequence[bytes], first: int) -> list[int]:
        """The pages of a prompt's blocks from ``first`` on that are cached, but for its last."""
        found = []
        for end in range((first + 1) * BLOCK_TOKENS, len(digests), BLOCK_TOKENS):
            page = self._cached.get(digests[end - 1])
            if page is None:
                break
            self._cached.move_to_end(digests[end - 1])
            found.append(page)
        return found

    def use(self, pages: Iterable[int]) -> None:
        self._users.update(pages)

    def release(self, pages: Iterable[int]) -> None:
        kept = set(self._cached.values())
        for page in pages:
            self._users[page] -= 1
            assert self._users[page] >= 0
            if not self._users[page] and page not in kept:
                self._free.append(page)

    @property
    def room(self) -> int:
        return len(self._free) + sum(not self._users[page] for page in self._cached.values())

    def take(self, count: int) -> list[int]:
        """Up to ``count`` unused pages: free ones first, then the oldest cached ones."""
        taken = []
        for _ in range(min(count, self.room)):
            if not self._free:
                digest = next(name for name, page in self._cached.items() if not self._users[page])
                self._free.append(self._cached.pop(digest))
            taken.append(self._free.pop())
        self.use(taken)
        return taken

    def commit(self, digest: bytes, page: int) -> None:
        """The page holds this block."""
        self._cached.setdefault(digest, page)
