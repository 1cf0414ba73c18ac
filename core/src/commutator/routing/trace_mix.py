"""Short chats mixed into a trace of long prompts, and a trace at another rate. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

from attrs import evolve

from commutator.routing.trace import TraceRequest

__all__ = ["at_rate", "with_chats"]

_PROMPT_TOKENS = (50, 450)
_ANSWER_TOKENS = (50, 350)


def with_chats(trace: Sequence[TraceRequest], per_request: float, seed: int) -> list[TraceRequest]:
    """``trace``, and among it so many chats for each of its requests.

    Prompts of 50 to 450 tokens, answers of 50 to 350, evenly drawn; they come at any time of the
    trace, and none shares a block with another request.
    """
    if not trace:
        return []
    rng = random.Random(seed)  # noqa: S311 - reproducible chance is the point
    first_ms, last_ms = trace[0].timestamp, trace[-1].timestamp
    chats = [
        TraceRequest(
            timestamp=rng.uniform(first_ms, last_ms),
            input_length=rng.randint(*_PROMPT_TOKENS),
            output_length=rng.randint(*_ANSWER_TOKENS),
            hash_ids=(-1 - number,),  # those of traces are not negative
        )
        for number in range(round(per_request * len(trace)))
    ]
    return sorted([*trace, *chats], key=lambda request: request.timestamp)


def at_rate(trace: Sequence[TraceRequest], per_s: float) -> list[TraceRequest]:
    """The same requests, so much nearer or farther apart that so many a second come on average."""
    first_ms, last_ms = trace[0].timestamp, trace[-1].timestamp
    factor = len(trace) / per_s * 1000 / max(1e-3, last_ms - first_ms)
    return [evolve(one, timestamp=(one.timestamp - first_ms) * factor) for one in trace]
