"""Whether a worker's events tell of the prompts that it computes. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from attrs import define, field, frozen

__all__ = ["PromptChecks"]

_ENOUGH = 8
_MOST_DUE = 64


@frozen
class _Prompt:
    first: int
    """Sequence hash of its first block: the last to be evicted."""
    last: int
    """Of its last full block, which no template or system prompt shares."""
    was_known: bool
    """The last block was indexed when the prompt had been computed: before, or at once."""
    computed_s: float
    drops: int


@define(eq=False)
class PromptChecks:
    """Looks prompts up in the index ``grace_s`` after they were computed.

    A prompt's last full block is looked for: what stands before it may be an old prompt's. Where
    blocks have been dropped meanwhile, it may have been, too, and then the first block decides.
    """

    grace_s: float = 5.0
    """Some engines send events every forty steps only."""
    last_message_s: float = float("-inf")
    """When the worker last sent an event."""
    drops: int = 0
    """Grows whenever its blocks leave the index."""
    checked: int = 0
    missing: int = 0
    """How many of the last of those checked, one after the other, were not in the index."""
    _due: deque[_Prompt] = field(factory=deque)
    _missed_s: deque[float] = field(factory=lambda: deque(maxlen=_ENOUGH))
    """When the last of those that are missing were computed."""
    _matched: bool = False
    """Some prompt was found, or began as the events tell."""

    def computed(self, hashes: Sequence[int], holds: Callable[[int], bool], now_s: float) -> None:
        """The worker has computed these full blocks. Of very many prompts at a time, some count."""
        if hashes and len(self._due) < _MOST_DUE:
            first, last = hashes[0], hashes[-1]
            self._due.append(_Prompt(first, last, holds(last), now_s, self.drops))

    def review(self, holds: Callable[[int], bool], now_s: float) -> None:
        """Look up the prompts that are due."""
        while self._due and self._due[0].computed_s + self.grace_s <= now_s:
            self.checked += 1
            self._look_up(self._due.popleft(), holds)

    @property
    def stopped(self) -> bool:
        """No event has come since before the last prompts that are missing."""
        enough = len(self._missed_s) == _ENOUGH
        return enough and self.last_message_s < self._missed_s[0] - self.grace_s

    @property
    def never_match(self) -> bool:
        """Events come, but not of the prompts.

        Where prompts have matched and the events may just have stopped, only time can tell.
        """
        if len(self._missed_s) < _ENOUGH or self.stopped:
            return False
        return not self._matched or self.last_message_s >= self._missed_s[0]

    def _look_up(self, prompt: _Prompt, holds: Callable[[int], bool]) -> None:
        begins, found = holds(prompt.first), holds(prompt.last)
        self._matched |= begins or found
        if not found and not (begins and self.drops != prompt.drops):
            self.missing += 1
            self._missed_s.append(prompt.computed_s)
            return
        heard = not self._missed_s or self.last_message_s > self._missed_s[-1]
        if heard or not prompt.was_known:
            self.missing = 0
            self._missed_s.clear()
        # Otherwise it is an old prompt again, which a silent worker need not tell of.
