"""When a request is sent again, and after which wait. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

_AGAIN = frozenset({408, 429, 502, 503})
"""Not now. A 500 or a 504 was computed and failed: once more would cost the same again."""
_JITTER = 0.25
"""Waits are longer by up to this share: clients that were refused together come back apart."""


@dataclass(frozen=True, slots=True)
class Retries:
    """The rules of one client. Times are in seconds."""

    most: int
    delay_s: float
    longest_wait_s: float

    def wait_s(
        self,
        attempt: int,
        status: int | None,
        headers: Mapping[str, str],
        *,
        now_unix_s: float,
        chance: float,
    ) -> float | None:
        """How long to wait before the next attempt; None: there is none.

        ``attempt`` of them were made, at least 1. ``status`` is the last answer's; None: there was
        none. ``headers`` are its headers, by names in lower case; ``chance`` is drawn from [0, 1).
        """
        if attempt > self.most:
            return None
        said = headers.get("x-should-retry", "").lower()
        if status is not None and (said == "false" or (said != "true" and status not in _AGAIN)):
            return None
        asked_s = retry_after_s(headers, now_unix_s)
        if asked_s is not None and asked_s > self.longest_wait_s:
            return None
        wait_s = asked_s
        if wait_s is None:
            # An exponent without bound is too large for a float.
            wait_s = min(self.delay_s * 2.0 ** min(attempt - 1, 32), self.longest_wait_s)
        return wait_s * (1 + _JITTER * chance)


def retry_after_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """When the server wants to be asked again, in seconds from now; None where it does not say."""
    for name, seconds in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            value = float(headers[name]) * seconds
        except (KeyError, ValueError):
            continue
        if math.isfinite(value) and value >= 0:
            return value
    try:
        at = parsedate_to_datetime(headers.get("retry-after", ""))
    except ValueError:
        return None
    return max(0.0, at.timestamp() - now_unix_s)
