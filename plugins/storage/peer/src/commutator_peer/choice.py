"""Which of many peers a look-up asks, so that its cost does not grow with their number. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection

from commutator import BlockKey

_REMEMBERED_CHAINS = 4096


class PeerChoice:
    """Chooses at most ``most`` peers for each look-up.

    First those that lent blocks of a chain with the same first block, then those that lent last,
    but for at least one place in two that is left to all others in turn: so a peer that has
    blocks, and that nobody has asked yet, is found after a few look-ups.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._chains: OrderedDict[BlockKey, list[str]] = OrderedDict()
        """The last lenders of chains by their first block, the chain used last at the end."""
        self._lenders: OrderedDict[str, None] = OrderedDict()
        """All lenders, the last one at the end."""
        self._turn = ""
        """The last peer that was asked in turn."""

    def choose(self, peers: Collection[str], first_block: BlockKey) -> list[str]:
        """The peers to ask for a chain with this first block."""
        if len(peers) <= self._most:
            return list(peers)
        known = set(peers)
        likely = dict.fromkeys((*self._chains.get(first_block, ()), *reversed(self._lenders)))
        chosen = [peer for peer in likely if peer in known][: self._most // 2]
        rest = sorted(known.difference(chosen))
        start = bisect_right(rest, self._turn)
        in_turn = (rest[start:] + rest[:start])[: self._most - len(chosen)]
        self._turn = in_turn[-1]
        return chosen + in_turn

    def lent(self, peer: str, first_block: BlockKey) -> None:
        """A peer lent blocks of a chain with this first block."""
        others = [other for other in self._chains.pop(first_block, ()) if other != peer]
        self._chains[first_block] = [peer, *others][: self._most]
        self._lenders.pop(peer, None)
        self._lenders[peer] = None
        for memory, most in ((self._chains, _REMEMBERED_CHAINS), (self._lenders, self._most)):
            while len(memory) > most:
                memory.popitem(last=False)
