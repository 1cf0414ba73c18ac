"""Has blocks brought up from slow tiers before they are needed; on the engine's thread."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import islice, takewhile

from commutator.kv import KvService
from commutator_reference.block_identity import BlockIdentity
from commutator_reference.blocks import BlockPool
from commutator_reference.sequence import Sequence

__all__ = ["LookAhead"]

_REQUESTS_AHEAD = 8
_CONVERSATIONS = 64


class LookAhead:
    """For requests that wait for their turn, and for conversations that may have a next one."""

    def __init__(self, service: KvService, pool: BlockPool) -> None:
        self._service = service
        self._pool = pool
        self._seen: set[int] = set()
        """Requests for which it was done."""
        self._ended: OrderedDict[bytes, list[BlockIdentity]] = OrderedDict()
        """The blocks of the conversations that ended last, by the last of them."""
        self._asking: tuple[str, list[BlockIdentity]] | None = None
        self._numbers = itertools.count(1)

    def waiting(self, queue: Iterable[Sequence]) -> None:
        """Requests whose turn has not come, the next one first."""
        for sequence in islice(queue, _REQUESTS_AHEAD):
            if sequence.key not in self._seen and self._done(
                str(sequence.key), self._identities(sequence)
            ):
                self._seen.add(sequence.key)

    def gone(self, key: int) -> None:
        """The request was served, or nobody wants it any more."""
        self._seen.discard(key)

    def ended(self, sequence: Sequence) -> None:
        """An answer is complete; another question may follow."""
        if identities := self._identities(sequence):
            last = identities[-1].digest
            self._ended[last] = identities
            self._ended.move_to_end(last)
            if len(self._ended) > _CONVERSATIONS:
                self._ended.popitem(last=False)

    def idle(self) -> None:
        """Nothing runs or waits: bring up the latest conversation for which it was not done."""
        if self._asking is None:
            if not self._ended or not self._service.idle:
                return
            _, identities = self._ended.popitem()
            self._asking = f"ahead-{next(self._numbers)}", identities
        ask_id, identities = self._asking
        if self._done(ask_id, identities):
            self._service.drop(ask_id)
            self._asking = None

    def _done(self, ask_id: str, identities: Many[BlockIdentity]) -> bool:
        """Whether what is not in the engine's own memory is on its way; False: ask again."""
        here = sum(1 for _ in takewhile(lambda i: self._pool.find(i) is not None, identities))
        keys = [identity.digest for identity in identities]
        return here == len(keys) or self._service.prefetch(ask_id, keys, here)

    def _identities(self, sequence: Sequence) -> list[BlockIdentity]:
        # The last token is computed in any case.
        full = (len(sequence.tokens) - 1) // self._pool.block_size
        return [sequence.identity(index, self._pool.block_size) for index in range(full)]
