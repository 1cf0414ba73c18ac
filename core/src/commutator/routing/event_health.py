"""Whether a worker's events can be believed: what would make overlap silently zero, said loudly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from attrs import define, field, frozen

from commutator.routing.event_prompts import PromptChecks
from commutator.routing.prefix_index import RankStatistics

__all__ = ["Cause", "EventHealth", "EventWarning"]

_SILENT_AFTER = 3
_LOSS_FADES_S = 300.0
_ORPHANS_STAY_S = 30.0


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
    """One problem of one worker, in words for the log and for ``/health``."""

    worker_id: str
    cause: Cause
    message: str


@define(eq=False)
class EventHealth:
    """Compares what a worker was given to compute with what its events say.

    ``endpoint`` is where it publishes, None when it does not, or when nobody listens: then what
    it has is guessed.
    """

    worker_id: str
    endpoint: str | None
    block_size: int
    expects_events: bool = True
    """False: the guess is what was configured."""
    unreadable: str = ""
    """Why its events cannot be subscribed to at all."""
    messages: int = 0
    decode_errors: int = 0
    lost: int = 0
    """Messages that no replay could bring back."""
    loss_is_recent: bool = False
    prompts: PromptChecks = field(factory=PromptChecks)
    unanswered: Sequence[str] = ()
    """Endpoints whose last replays all failed."""
    orphans_stay: bool = False
    """Blocks have waited for their parents for longer than messages can overtake each other."""
    _loss_fades_s: float = 0.0
    _orphans_since_s: float | None = None

    def review(
        self,
        now_s: float,
        holds: Callable[[int], bool],
        lost: int = 0,
        orphans: int = 0,
        unanswered: Sequence[str] = (),
    ) -> None:
        """Look up the prompts that are due.

        ``holds`` tells whether the worker has a block; ``lost`` is how many messages were lost in
        all, ``orphans`` how many blocks wait for their parents; for ``unanswered`` see there.
        """
        self.unanswered = unanswered
        if not orphans:
            self._orphans_since_s = None
        elif self._orphans_since_s is None:
            self._orphans_since_s = now_s
        begun_s = self._orphans_since_s
        self.orphans_stay = begun_s is not None and now_s - begun_s >= _ORPHANS_STAY_S
        if lost > self.lost:
            self.lost = lost
            self._loss_fades_s = now_s + _LOSS_FADES_S
        self.loss_is_recent = now_s < self._loss_fades_s
        self.prompts.review(holds, now_s)

    def warnings(
        self, announced_block_size: int, ranks: Iterable[RankStatistics]
    ) -> list[EventWarning]:
        """What is wrong now, worst first. ``ranks``: what the index knows of the worker."""
        ranks = list(ranks)
        found = [
            self._no_source(),
            self._silent(),
            self._block_size(announced_block_size, ranks),
            self._stopped(ranks),
            self._never_matches(ranks),
            self._media(ranks),
            self._untraceable(ranks),
            self._malformed(ranks),
            self._other_groups(ranks),
            self._orphans(ranks),
            self._lost(),
            self._no_replay(),
        ]
        return [EventWarning(self.worker_id, cause, f"worker {self.worker_id} {message}")
                for cause, message in filter(None, found)]  # fmt: skip

    def _no_source(self) -> tuple[Cause, str] | None:
        if self.unreadable:
            return Cause.UNREADABLE, (
                f"publishes KV events where they cannot be read ({self.unreadable}); give it an "
                "address that can be connected to from here"
            )
        if self.endpoint is not None or not self.expects_events:
            return None
        return Cause.NO_SOURCE, (
            "publishes no KV events, so what it has cached is guessed from what it was sent; "
            "switch its event publisher on, or set router.use_kv_events to false if guessing is "
            "meant"
        )

    def _silent(self) -> tuple[Cause, str] | None:
        if (
            self.endpoint is None
            or self.unreadable
            or self.messages
            or self.prompts.checked < _SILENT_AFTER
        ):
            return None
        return Cause.SILENT, (
            f"has computed {self.prompts.checked} prompts, but no KV event came from "
            f"{self.endpoint}; check that the engine publishes events (prefix caching on, "
            "publisher on) and that this address can be reached from here"
        )

    def _block_size(self, announced: int, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        sizes = {announced}.union(*(rank.block_sizes for rank in ranks))
        others = sorted(sizes - {self.block_size})
        if not others:
            return None
        text = " and ".join(str(size) for size in others)
        if self.endpoint is None:
            if self.block_size % announced == 0:
                return None  # it finds all that is guessed
            return Cause.BLOCK_SIZE, (
                f"has blocks of {text} tokens where the router counts {self.block_size}: less of "
                "a prefix may be found there than is guessed; give both the same size"
            )
        if all(size % self.block_size == 0 for size in others):
            return Cause.BLOCK_SIZE, (
                f"has blocks of {text} tokens where the router counts {self.block_size}: prefixes "
                "are found in whole blocks of the engine only"
            )
        return Cause.BLOCK_SIZE, (
            f"has blocks of {text} tokens, which {self.block_size} (the router's) does not divide: "
            "its cache cannot be indexed and its overlap is always zero; give both the same size"
        )

    def _stopped(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        if not self.messages or not self.prompts.stopped or _unusable(ranks):
            return None
        return Cause.STOPPED, (
            f"has computed {self.prompts.missing} prompts since its last KV event, and none came "
            f"of them from {self.endpoint}, so what is known of its cache is old; look whether its "
            "publisher still runs (the engine's log) and whether something on the way drops quiet "
            "connections, and start the worker again if nothing comes"
        )

    def _never_matches(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        if not self.messages or not self.prompts.never_match or _unusable(ranks):
            return None
        orphans = sum(rank.orphans for rank in ranks)
        waiting = f", or were published too early ({orphans} blocks wait for theirs)"
        return Cause.NEVER_MATCHES, (
            f"has computed {self.prompts.missing} prompts in a row whose last full block is in "
            "none of its events: its tokens, its adapter's name or its cache salt differ from the "
            "router's" + (waiting if orphans else "")
        )

    def _media(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        media = sorted({medium for rank in ranks for medium in rank.unknown_media})
        if not media:
            return None
        return Cause.UNKNOWN_MEDIUM, (
            f"stores blocks in {', '.join(media)}, which is no tier known here: they count as "
            "external"
        )

    def _untraceable(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        blocks = sum(rank.counters["untraceable"] for rank in ranks)
        if not blocks:
            return None
        return Cause.UNTRACEABLE, (
            f"stored {blocks} blocks in a lower tier without their tokens, so they are not seen; "
            "vLLM's offloading connector adds them with self_describing_kv_events"
        )

    def _malformed(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        blocks = sum(rank.counters["malformed"] for rank in ranks)
        if not blocks and not self.decode_errors:
            return None
        return Cause.MALFORMED, (
            f"sent {self.decode_errors} messages that are no KV events and {blocks} blocks whose "
            "tokens do not fit their number: its event format is not understood here"
        )

    def _other_groups(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        blocks = sum(rank.counters["other_groups"] for rank in ranks)
        if not blocks:
            return None
        return Cause.OTHER_GROUPS, (
            f"has layers of several kinds, of which those that keep whole prefixes are followed; "
            f"{blocks} blocks of the others (windows, states) are not, so it may find less of a "
            "prefix than is counted on"
        )

    def _orphans(self, ranks: list[RankStatistics]) -> tuple[Cause, str] | None:
        if not self.orphans_stay:
            return None
        orphans = sum(rank.orphans for rank in ranks)
        dropped = sum(rank.orphans_dropped for rank in ranks)
        return Cause.ORPHANS, (
            f"has {orphans} blocks that follow blocks nobody here was told of ({dropped} more were "
            "given up), so they count for nothing until it stores those again; a longer replay "
            "buffer lets a front door that starts alone hear of them"
        )

    def _lost(self) -> tuple[Cause, str] | None:
        if not self.loss_is_recent:
            return None
        return Cause.LOST, (
            f"sent {self.lost} event messages that could not be had again, so what was known of "
            "its cache was dropped; give it a replay endpoint and a longer replay buffer"
        )

    def _no_replay(self) -> tuple[Cause, str] | None:
        if not self.unanswered:
            return None
        return Cause.NO_REPLAY, (
            f"leaves requests for missed KV events unanswered at {', '.join(self.unanswered)}, so "
            "every message that is missed costs all that is known of its cache; check that this "
            "address can be reached from here and that the engine's publisher still runs"
        )


def _unusable(ranks: list[RankStatistics]) -> bool:
    """Its blocks cannot be indexed, which is a problem of its own."""
    return any(rank.counters["unusable"] for rank in ranks)
