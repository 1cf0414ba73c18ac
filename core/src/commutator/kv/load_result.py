"""What became of one block that was to be loaded."""

from __future__ import annotations

from enum import Enum

__all__ = ["LoadResult"]


class LoadResult(Enum):
    """Only ``LOADED`` blocks may be used; every other outcome is a miss."""

    LOADED = "loaded"
    """The bytes are there and verified."""
    MISSING = "missing"
    """The tier does not have it any more, or has what others can read: theirs stays."""
    CORRUPT = "corrupt"
    """The tier had something else: it must not be read again."""
    FAILED = "failed"
    """It could not be read, now; it may be readable later."""
