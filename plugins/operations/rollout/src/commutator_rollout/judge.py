"""Whether a new version of a model is worse than the others that share its alias. Pure.

State goes in and out, and time with it. Three tests look at every request, each of which stays
silent for an equal version with the same probability, however often it is asked: errors, times to
first token, inter-token latencies. The first that speaks ends the canary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from attrs import evolve, field, frozen

from commutator_traffic.config import CanaryConfig
from commutator_traffic.statistics import Higher, MoreOften

_FALSE_ALARM = 0.005
"""The greatest probability that an equal version is taken to be worse."""
_TESTS = 3
_SURE = math.log(_TESTS / _FALSE_ALARM)


@frozen(kw_only=True)
class Arm:
    """Requests of one or more versions."""

    ended: int = 0
    """Complete or failed; not those that their clients gave up."""
    failed: int = 0
    ttft_s: Sequence[float] = ()
    """Times to first token; of a request that was given up before it, the time that it waited."""
    itl_s: Sequence[float] = ()
    """The mean inter-token latency of each complete answer of at least two tokens."""

    def __add__(self, other: Arm) -> Arm:
        return Arm(
            ended=self.ended + other.ended,
            failed=self.failed + other.failed,
            ttft_s=(*self.ttft_s, *other.ttft_s),
            itl_s=(*self.itl_s, *other.itl_s),
        )

    def counts(self) -> Arm:
        """Without the times."""
        return Arm(ended=self.ended, failed=self.failed)


@frozen(kw_only=True)
class Seen:
    """What is known at one time."""

    serves: bool
    """Whether the new version gets its share, and a worker of it is ready."""
    old: Arm = Arm()
    """Requests that ended since the last time, with the other versions."""
    new: Arm = Arm()
    """The same, with the new one."""
    crash: str = ""
    """Why a worker of the new version that was ready is not any more; empty if none is so."""


@frozen(kw_only=True)
class Judging:
    """Everything that is remembered of one canary; never changed in place."""

    begun_s: float
    serves_since_s: float | None = None
    """When it first got its share; None: it is awaited."""
    old: Arm = Arm()
    """Counts since then."""
    new: Arm = Arm()
    errors: MoreOften = field(factory=MoreOften)
    ttft: Higher = field(factory=Higher)
    itl: Higher = field(factory=Higher)


@frozen
class Verdict:
    """What becomes of a canary."""

    good: bool
    why: str
    """For people."""


def begin(config: CanaryConfig, now_s: float) -> Judging:
    """A canary that was accepted at ``now_s``."""
    return Judging(
        begun_s=now_s, ttft=Higher(config.ttft_tolerance), itl=Higher(config.itl_tolerance)
    )


def judge(
    config: CanaryConfig, state: Judging, seen: Seen, now_s: float
) -> tuple[Judging, Verdict | None]:
    """The state after what was ``seen``, and a verdict as soon as there is one."""
    if (since_s := state.serves_since_s) is None:
        if seen.serves:
            # Requests that ended in the seconds before were not divided by chance.
            return evolve(state, serves_since_s=now_s), None
        if now_s - state.begun_s > config.ready_within_s:
            return state, Verdict(False, f"it was not ready within {config.ready_within_s:g} s")
        return state, None
    if seen.crash:
        return state, Verdict(False, seen.crash)
    old, new = seen.old, seen.new
    state = evolve(
        state,
        old=state.old + old.counts(),
        new=state.new + new.counts(),
        errors=state.errors.add(old.failed, old.ended, new.failed, new.ended),
        ttft=state.ttft.add(old.ttft_s, new.ttft_s),
        itl=state.itl.add(old.itl_s, new.itl_s),
    )
    return state, _verdict(config, state, now_s - since_s)


def _verdict(config: CanaryConfig, state: Judging, served_s: float) -> Verdict | None:
    figures, told = counts_text(state), evidence(state)
    for test, worse in (
        ("errors", "more of its requests fail"),
        ("ttft", f"first tokens take over {config.ttft_tolerance:.0%} longer"),
        ("itl", f"tokens take over {config.itl_tolerance:.0%} longer"),
    ):
        if told[test] >= 1:
            return Verdict(False, f"{worse} ({figures})")
    if served_s >= config.judge_for_s and state.new.ended >= config.min_requests:
        return Verdict(True, f"no worse in {served_s:.0f} s ({figures})")
    if served_s >= config.decide_within_s:
        return Verdict(False, f"too few requests in {served_s:.0f} s to tell ({figures})")
    return None


def counts_text(state: Judging) -> str:
    """Its requests and those of the others, for people."""
    old, new = state.old, state.new
    return f"{new.failed} of {new.ended} requests failed, {old.failed} of {old.ended} of the others"


def evidence(state: Judging) -> dict[str, float]:
    """How near each test is to ending the canary: 1 ends it, 0 or less tells nothing."""
    return {
        "errors": state.errors.log_stake / _SURE,
        "ttft": state.ttft.log_stake / _SURE,
        "itl": state.itl.log_stake / _SURE,
    }
