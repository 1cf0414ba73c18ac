"""What plugins implement and exchange with core: abstract classes, values and their errors.

Imports the standard library, attrs and ``commutator.errors``, nothing else. Plugins import these
names from ``commutator``.
"""

__all__ = ["CONTRACT_VERSION"]

CONTRACT_VERSION = (0, 1)
"""The contract that this package implements: the first two numbers of Commutator's version.

Within one contract version names, hooks, arguments and fields are added, never removed, renamed,
reordered or given another meaning. A plugin states what it was built for in its distribution's
metadata, as ``commutator>=0.1,<0.2``; the host skips a plugin that was built for another.
"""
