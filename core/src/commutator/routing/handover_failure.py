"""What becomes of a request whose KV did not arrive. Pure."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

__all__ = ["OnFailure", "Way", "next_way"]

OnFailure = Literal["fail", "prefill_locally", "another_worker"]


class Way(StrEnum):
    """How it goes on."""

    FAIL = "fail"
    LOCALLY = "prefill_locally"
    ANOTHER = "another_worker"


def next_way(on_failure: OnFailure, failures: int, *, overloaded: bool) -> Way:
    """After the ``failures``-th failed hand-over of a request.

    ``overloaded``: the prefill worker was only full. That is no failure, does not count as one, and
    whatever was chosen for failures another worker may have room.
    """
    if overloaded:
        return Way.ANOTHER
    if on_failure == "another_worker":
        return Way.ANOTHER if failures == 1 else Way.LOCALLY
    return Way(on_failure)
