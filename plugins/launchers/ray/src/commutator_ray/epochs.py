"""How the ranks of a worker over several nodes start together, and end together. Pure.

Each attempt of the whole group is an *epoch*. ``Epochs``, beside rank 0, opens one when every rank
answers and none runs, and closes it when any rank has ended, was replaced, or is silent. A
``Member``, beside each rank, runs its process in an open epoch only. The ranks of an epoch meet at
a master address and port that rank 0 chooses anew for each, so that a rank that still runs in an
older one, on a host that is cut off, meets nobody.
"""

from __future__ import annotations

from attrs import define, frozen

from commutator.backoff import Backoff

BEAT_S = 0.5
"""Between two beats of a rank."""
_SILENCE_S = 10.0
"""A rank that is not heard for so long is lost; one that hears nothing for so long stops."""
_BACKOFF = Backoff(first_s=0.5, longest_s=30.0)


@frozen
class Epoch:
    """One attempt of all ranks to run together."""

    name: str
    """No other epoch has it."""
    master_address: str
    master_port: int
    """Where rank 0 expects the others."""


@frozen(kw_only=True)
class Beat:
    """What a rank says of itself, again and again."""

    rank: int
    member: str
    """Names the ``Member``; another one has taken the rank over if it differs."""
    running: str | None
    """The name of the epoch in which its process runs; None: nothing of it runs."""
    ended: str | None
    """The last epoch in which its process has ended."""
    address: str
    port: int
    """Where rank 0, which does not run, would expect the others; never twice the same."""


@define
class _Heard:
    beat: Beat
    at_s: float


class Epochs:
    """Opens and closes the epochs of one group. It is told the time."""

    def __init__(
        self, nodes: int, name: str, *, silence_s: float = _SILENCE_S, backoff: Backoff = _BACKOFF
    ) -> None:
        """``name``: of this object, which no other has; ``backoff``: the waits between epochs."""
        self._ranks = range(nodes)
        self._name = name
        self._silence_s = silence_s
        self._backoff = backoff
        self._heard: dict[int, _Heard] = {}
        self._replaced: set[str] = set()
        self._count = 0
        self._open: tuple[Epoch, dict[int, str], float] | None = None
        """An epoch, its members by rank, and since when."""
        self._wait_until_s = 0.0
        self._port = 0
        """Of the last epoch. Some ranks may still begin that when rank 0 has not begun it."""

    def hear(self, beat: Beat, now_s: float) -> Epoch | None:
        """The epoch in which the rank is to run; None: it is to run nothing."""
        before = self._heard.get(beat.rank)
        if before is not None and before.beat.member != beat.member:
            is_back = beat.member in self._replaced  # from a host that was cut off
            if is_back and now_s - before.at_s <= self._silence_s:
                return None
            self._replaced.add(before.beat.member)
            self._replaced.discard(beat.member)
        self._heard[beat.rank] = _Heard(beat, now_s)
        if self._open is not None and self._is_over(now_s):
            _, _, since_s = self._open
            self._open = None
            self._backoff, wait_s = self._backoff.after_failure(now_s - since_s)
            self._wait_until_s = now_s + wait_s
        if self._open is None and self._all_wait(now_s):
            self._begin(now_s)
        return None if self._open is None else self._open[0]

    def _is_over(self, now_s: float) -> bool:
        assert self._open is not None
        epoch, members, _ = self._open
        return any(
            now_s - heard.at_s > self._silence_s
            or heard.beat.member != members[rank]
            or heard.beat.ended == epoch.name
            for rank, heard in self._heard.items()
        )

    def _all_wait(self, now_s: float) -> bool:
        waits = all(
            (heard := self._heard.get(rank)) is not None
            and heard.beat.running is None
            and now_s - heard.at_s <= self._silence_s
            for rank in self._ranks
        )
        return waits and now_s >= self._wait_until_s and self._heard[0].beat.port != self._port

    def _begin(self, now_s: float) -> None:
        self._count += 1
        first = self._heard[0].beat
        epoch = Epoch(f"{self._name}-{self._count}", first.address, first.port)
        members = {rank: heard.beat.member for rank, heard in self._heard.items()}
        self._open = (epoch, members, now_s)
        self._port = first.port


class Member:
    """One rank's side: when its process starts, and when it has to stop. It is told the time."""

    def __init__(self, rank: int, name: str, *, silence_s: float = _SILENCE_S) -> None:
        """``name``: as ``Beat.member``."""
        self.rank = rank
        self._name = name
        self._silence_s = silence_s
        self._answer: Epoch | None = None
        self._asked_s = float("-inf")
        """When the last beat was sent that was answered."""
        self._running: Epoch | None = None
        self._ended: str | None = None

    @property
    def runs(self) -> bool:
        """Whether anything of its process runs."""
        return self._running is not None

    def beat(self, address: str, port: int) -> Beat:
        """What to send now."""
        return Beat(
            rank=self.rank,
            member=self._name,
            running=None if self._running is None else self._running.name,
            ended=self._ended,
            address=address,
            port=port,
        )

    def hear(self, answer: Epoch | None, asked_s: float) -> None:
        """What ``Epochs.hear`` answered to a beat that was sent at ``asked_s``."""
        self._answer, self._asked_s = answer, asked_s

    def to_start(self, now_s: float) -> Epoch | None:
        """The epoch in which its process is to start now; None: in none."""
        if self._running is not None or self._is_alone(now_s) or self._answer is None:
            return None
        return None if self._answer.name == self._ended else self._answer

    def has_to_stop(self, now_s: float) -> bool:
        """Whether the epoch in which its process runs is over, or may be."""
        return self._running is not None and (
            self._answer != self._running or self._is_alone(now_s)
        )

    def started(self, epoch: Epoch) -> None:
        """Its process runs."""
        self._running = epoch

    def stopped(self) -> None:
        """Nothing of its process runs any more."""
        if self._running is not None:
            self._ended = self._running.name
            self._running = None

    def _is_alone(self, now_s: float) -> bool:
        return now_s - self._asked_s >= self._silence_s
