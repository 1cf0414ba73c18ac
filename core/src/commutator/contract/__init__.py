"""What plugins implement and exchange with core: abstract classes, values and their errors.

Imports the standard library, attrs and ``commutator.errors``, nothing else. Plugins import these
names from ``commutator``.
"""

from collections.abc import Mapping

from commutator import __version__

__all__ = ["CONTRACT_CHANGES", "CONTRACT_VERSION", "changes_since"]

_MAJOR, _MINOR = map(int, __version__.split(".")[:2])

CONTRACT_VERSION = (_MAJOR, _MINOR)
"""The contract that this package implements: the first two numbers of Commutator's version.

Within one contract version names, hooks, arguments and fields are added, never removed, renamed,
reordered or given another meaning. A plugin states what it was built for in its distribution's
metadata, as ``commutator>=0.2,<0.3``; the host skips a plugin that was built for another.
"""

CONTRACT_CHANGES: Mapping[tuple[int, int], str] = {
    (0, 2): (
        "requests ask by typed fields (adapter, where lora_name was; options, where extra was; "
        "constraint, media), and engines get only what their EngineInfo declares"
    )
}
"""For each contract version what breaks plugins of the one before, in a line; the CHANGELOG says
what to do about it."""


def changes_since(built_for: tuple[int, int], now: tuple[int, int]) -> str:
    """What changed after ``built_for`` up to ``now``, in a line; empty if nothing is known."""
    later = sorted(version for version in CONTRACT_CHANGES if built_for < version <= now)
    return "; ".join(f"{major}.{minor}: {CONTRACT_CHANGES[major, minor]}" for major, minor in later)
