"""Which blocks are held for which hand-over, and until when. Pure: the time is passed in."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from attrs import define, field

from commutator.engine.handover.pull_words import ExportNews, ExportState, ReadyBlock

__all__ = ["Exports"]

_REMEMBERED = 4096
"""Hand-overs that ended and whose late questions still get the right answer."""


@define
class _Export:
    lease_s: float
    ends_s: float
    held: list[int] = field(factory=list)
    ready: list[ReadyBlock] = field(factory=list)
    computed: bool = False


class Exports:
    """The prefill side's hand-overs.

    A hand-over begins, holds blocks, tells of those that are ready, and ends once: released,
    failed or lapsed, whichever is first. Whatever ends it returns the blocks that it held. It may
    end before it begins, because the decode leg was quicker: then it holds nothing.
    """

    def __init__(self) -> None:
        self._exports: dict[str, _Export] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self.ends: Counter[str] = Counter()
        """How many ended, by how: "released", "failed", "lapsed"."""

    def __len__(self) -> int:
        return len(self._exports)

    @property
    def held(self) -> list[int]:
        """Every held block, once for each hand-over that holds it."""
        return [block for export in self._exports.values() for block in export.held]

    def knows(self, export_id: str) -> bool:
        """Whether it was begun or has ended."""
        return export_id in self._exports or export_id in self._ended

    def begin(self, export_id: str, lease_s: float, now_s: float) -> bool:
        """Whether anybody still wants it. Raises ValueError when it has begun already."""
        if export_id in self._exports:
            raise ValueError(f"hand-over {export_id} has begun already")
        if export_id in self._ended:
            return False
        self._exports[export_id] = _Export(lease_s, now_s + lease_s)
        return True

    def hold(self, export_id: str, blocks: Sequence[int]) -> bool:
        """Hold the prompt's next blocks. False when the hand-over is over: nothing is held."""
        export = self._exports.get(export_id)
        if export is None:
            return False
        export.held.extend(blocks)
        return True

    def publish(self, export_id: str, blocks: Sequence[ReadyBlock]) -> None:
        """The next of the held blocks can be read. Nothing if the hand-over is over."""
        export = self._exports.get(export_id)
        if export is not None:
            export.ready.extend(blocks)

    def complete(self, export_id: str) -> None:
        """No more blocks will be held. Nothing if the hand-over is over."""
        export = self._exports.get(export_id)
        if export is not None:
            export.computed = True

    def watch(self, export_id: str, have: int, now_s: float) -> ExportNews:
        """What there is beyond the first ``have`` blocks; the lease begins anew."""
        export = self._exports.get(export_id)
        if export is None:
            reason = self._ended.get(export_id)
            if reason is None:
                return ExportNews(ExportState.UNKNOWN)
            return ExportNews(ExportState.FAILED, reason=reason)
        export.ends_s = max(export.ends_s, now_s + export.lease_s)
        done = export.computed and len(export.ready) == len(export.held)
        state = ExportState.COMPLETE if done else ExportState.RUNNING
        return ExportNews(state, tuple(export.ready[max(0, have) :]))

    def fail(self, export_id: str, reason: str) -> list[int]:
        """Its prefill leg was aborted, or failed."""
        return self._end(export_id, "failed", reason)

    def release(self, export_id: str) -> list[int]:
        """The decode side is done with it, or gave up."""
        return self._end(export_id, "released", "the decode side had released it")

    def expire(self, now_s: float) -> list[int]:
        """End those whose lease is over."""
        over = [each for each, export in self._exports.items() if export.ends_s <= now_s]
        freed: list[int] = []
        for export_id in over:
            freed += self._end(export_id, "lapsed", "nobody asked for it, and its lease is over")
        return freed

    def end_all(self, reason: str) -> list[int]:
        """Fail all of them."""
        return [block for each in list(self._exports) for block in self.fail(each, reason)]

    def _end(self, export_id: str, how: str, reason: str) -> list[int]:
        export = self._exports.pop(export_id, None)
        if export_id not in self._ended:
            self._ended[export_id] = reason
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        if export is None:
            return []
        self.ends[how] += 1
        return export.held
