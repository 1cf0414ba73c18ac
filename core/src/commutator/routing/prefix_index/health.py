"""Checks each worker's KV events, and warns of problems that would make its overlap wrong."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from enum import StrEnum

from attrs import define, field, frozen

from commutator.routing.prefix_index.index import RankBlocks

_SILENT_AFTER = 3
"""Computed prompts without any event after which a worker counts as silent."""
_ENOUGH = 8
"""Missing prompts after which its events count as stopped, or as never matching."""
_MOST_DUE = 64
_LOSS_FADES_S = 300.0
_ORPHANS_STAY_S = 30.0
"""Longer than messages can be out of order."""


class Cause(StrEnum):
    """What is wrong with a worker's events."""

    NO_SOURCE = "no_source"
    UNREADABLE = "unreadable"
    SILENT = "silent"
    BLOCK_SIZE = "block_size"
    STOPPED = "stopped"
    NEVER_MATCHES = "never_matches"
    UNKNOWN_MEDIUM = "unknown_medium"
    UNTRACEABLE = "untraceable"
    MALFORMED = "malformed"
    OTHER_GROUPS = "other_groups"
    ORPHANS = "orphans"
    LOST = "lost"
    NO_REPLAY = "no_replay"


@frozen
class EventWarning:
    """One problem of one worker, for the log and ``/health``."""

    worker_id: str
    cause: Cause
    message: str


@frozen
class _Prompt:
    first: int
    """Sequence hash of its first block: the last to be evicted."""
    last: int
    """Of its last full block, which no template or system prompt shares."""
    was_known: bool
    """The last block was already in the index when the worker had computed the prompt."""
    computed_s: float
    drops: int


@define(eq=False)
class PromptChecks:
    """Looks prompts up in the index ``grace_s`` after they were computed.

    The prompt's last full block decides, because earlier ones may be those of an old prompt. If
    the worker has dropped blocks since, the last one may be among them, and the first decides.
    """

    grace_s: float = 5.0
    """Some engines send events every forty steps only."""
    last_message_s: float = float("-inf")
    """When the worker last sent an event."""
    drops: int = 0
    """Grows whenever its blocks leave the index."""
    checked: int = 0
    missing: int = 0
    """The number of checked prompts in a row, up to the last, that were not in the index."""
    _due: deque[_Prompt] = field(factory=deque)
    _missed_s: deque[float] = field(factory=lambda: deque(maxlen=_ENOUGH))
    """When the last missing prompts were computed."""
    _matched: bool = False
    """A prompt, or at least its first block, was found in the index."""

    def computed(self, hashes: Sequence[int], holds: Callable[[int], bool], now_s: float) -> None:
        """Note a prompt that the worker has computed, unless very many are to be checked."""
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
        """The last event is older than all of the last missing prompts."""
        enough = len(self._missed_s) == _ENOUGH
        return enough and self.last_message_s < self._missed_s[0] - self.grace_s

    @property
    def never_match(self) -> bool:
        """Events arrive, but none matches the prompts.

        If prompts have matched before, only an event after a missing prompt proves it: otherwise
        the events may have just stopped.
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
        has_event = not self._missed_s or self.last_message_s > self._missed_s[-1]
        if has_event or not prompt.was_known:
            self.missing = 0
            self._missed_s.clear()
        # Otherwise it is a repeated prompt, for which the worker need not send an event.


@define(eq=False)
class EventHealth:
    """Compares the prompts that a worker has computed with its events.

    ``endpoint`` is where it publishes; None when it does not, or its events are not read. Its
    blocks are then guessed.
    """

    worker_id: str
    endpoint: str | None
    block_size: int
    expects_events: bool = True
    """False when the configuration asks for guessing."""
    unreadable: str = ""
    """Why its events cannot be subscribed to; empty when they can."""
    messages: int = 0
    decode_errors: int = 0
    prompts: PromptChecks = field(factory=PromptChecks)
    _lost: int = 0
    """Messages that no replay could bring back."""
    _loss_fades_s: float = 0.0
    _orphans_since_s: float | None = None

    def warnings(
        self,
        now_s: float,
        announced_block_size: int,
        ranks: Collection[RankBlocks],
        lost: int = 0,
        unanswered: Sequence[str] = (),
    ) -> list[EventWarning]:
        """The present problems, worst first.

        ``ranks``: what the index knows of the worker. ``lost``: messages lost so far.
        ``unanswered``: endpoints whose last replays all failed.
        """
        if lost > self._lost:
            self._lost, self._loss_fades_s = lost, now_s + _LOSS_FADES_S
        if not any(rank.orphans for rank in ranks):
            self._orphans_since_s = None
        elif self._orphans_since_s is None:
            self._orphans_since_s = now_s
        return [
            *self._source_problems(announced_block_size, ranks),
            *self._event_problems(ranks),
            *self._loss_problems(now_s, ranks, unanswered),
        ]

    def _source_problems(
        self, announced_block_size: int, ranks: Collection[RankBlocks]
    ) -> Iterator[EventWarning]:
        """Why there are no events, or none that match the prompts."""
        prompts = self.prompts
        if self.unreadable:
            yield self._warning(
                Cause.UNREADABLE,
                f"publishes KV events where they cannot be read ({self.unreadable}); give it an "
                "address that can be connected to from here",
            )
        elif self.endpoint is None and self.expects_events:
            yield self._warning(
                Cause.NO_SOURCE,
                "publishes no KV events, so its cached blocks are guessed from the requests it was "
                "sent; switch its event publisher on, or set router.use_kv_events to false if "
                "guessing is intended",
            )
        elif self.endpoint is not None and not self.messages and prompts.checked >= _SILENT_AFTER:
            yield self._warning(
                Cause.SILENT,
                f"has computed {prompts.checked} prompts, but no KV event came from "
                f"{self.endpoint}; check that the engine publishes events (prefix caching on, "
                "publisher on) and that this address can be reached from here",
            )
        if (problem := self._block_size_problem(announced_block_size, ranks)) is not None:
            yield self._warning(Cause.BLOCK_SIZE, problem)
        unusable = any(rank.counters.unusable for rank in ranks)  # which is a warning already
        if not self.messages or unusable:
            return
        if prompts.stopped:
            yield self._warning(
                Cause.STOPPED,
                f"has computed {prompts.missing} prompts since its last KV event, and none of "
                f"their events came from {self.endpoint}, so the index of its cache is outdated; "
                "check in the engine's log that its publisher still runs, and that nothing on the "
                "way drops idle connections; restart the worker if no events come",
            )
        elif prompts.never_match:
            orphans = sum(len(rank.orphans) for rank in ranks)
            waiting = f", or were published too early ({orphans} blocks wait for their parents)"
            yield self._warning(
                Cause.NEVER_MATCHES,
                f"has computed {prompts.missing} prompts in a row whose last full block is in "
                "none of its events: its tokens, its adapter's name or its cache salt differ from "
                "the router's" + (waiting if orphans else ""),
            )

    def _block_size_problem(self, announced: int, ranks: Collection[RankBlocks]) -> str | None:
        sizes = {announced}.union(*(rank.block_sizes for rank in ranks))
        others = sorted(sizes - {self.block_size})
        # A worker whose blocks are guessed finds all of them if ours are a multiple of its own.
        if not others or (self.endpoint is None and self.block_size % announced == 0):
            return None
        text = f"has blocks of {' and '.join(map(str, others))} tokens"
        if self.endpoint is None:
            return (
                f"{text} where the router counts {self.block_size}: less of a prefix may be found "
                "there than is guessed; give both the same size"
            )
        if all(size % self.block_size == 0 for size in others):
            return (
                f"{text} where the router counts {self.block_size}: prefixes are found in whole "
                "blocks of the engine only"
            )
        return (
            f"{text}, which {self.block_size} (the router's) does not divide: its cache cannot be "
            "indexed and its overlap is always zero; give both the same size"
        )

    def _event_problems(self, ranks: Collection[RankBlocks]) -> Iterator[EventWarning]:
        """What its events contain that cannot be indexed."""
        if media := sorted({medium for rank in ranks for medium in rank.unknown_media}):
            yield self._warning(
                Cause.UNKNOWN_MEDIUM,
                f"stores blocks in {', '.join(media)}, which is no tier known here: they count as "
                "external",
            )
        if blocks := sum(rank.counters.untraceable for rank in ranks):
            yield self._warning(
                Cause.UNTRACEABLE,
                f"stored {blocks} blocks in a lower tier without their tokens, so they are not "
                "indexed; switch on the engine's option that adds the tokens to these events",
            )
        blocks = sum(rank.counters.malformed for rank in ranks)
        if blocks or self.decode_errors:
            yield self._warning(
                Cause.MALFORMED,
                f"sent {self.decode_errors} messages that are no KV events and {blocks} blocks "
                "whose tokens do not fit their number: its event format is not understood here",
            )
        if blocks := sum(rank.counters.other_groups for rank in ranks):
            yield self._warning(
                Cause.OTHER_GROUPS,
                "has several groups of layers that keep whole prefixes, of which the first is "
                f"followed; {blocks} blocks of the others are not, so it may find less of a prefix "
                "than the router counts on",
            )

    def _loss_problems(
        self, now_s: float, ranks: Collection[RankBlocks], unanswered: Sequence[str]
    ) -> Iterator[EventWarning]:
        """What is missing because messages did not arrive."""
        since_s = self._orphans_since_s
        if since_s is not None and now_s - since_s >= _ORPHANS_STAY_S:
            orphans = sum(len(rank.orphans) for rank in ranks)
            dropped = sum(rank.orphans.dropped for rank in ranks)
            yield self._warning(
                Cause.ORPHANS,
                f"has {orphans} blocks whose parents are unknown here ({dropped} more were "
                "dropped), so they are not counted until it stores the parents again; with a "
                "longer replay buffer, a front door that starts alone gets their events",
            )
        if now_s < self._loss_fades_s:
            yield self._warning(
                Cause.LOST,
                f"sent {self._lost} event messages that were lost for good, so its blocks were "
                "dropped from the index; give it a replay endpoint and a longer replay buffer",
            )
        if unanswered:
            yield self._warning(
                Cause.NO_REPLAY,
                f"leaves requests for missed KV events unanswered at {', '.join(unanswered)}, so "
                "every missed message makes all its blocks unknown; check that this address can "
                "be reached from here and that the engine's publisher still runs",
            )

    def _warning(self, cause: Cause, problem: str) -> EventWarning:
        return EventWarning(self.worker_id, cause, f"worker {self.worker_id} {problem}")
