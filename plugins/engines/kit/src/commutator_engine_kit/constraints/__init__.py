"""What an answer has to follow, in words of what engines enforce it with: llguidance, or others.

``rewriting`` says keywords of JSON schemas by others, ``llguidance`` writes a constraint for a
server that enforces it with this library, and ``limits`` refuses what other libraries ignore.
"""

from __future__ import annotations

from commutator_engine_kit.constraints.limits import check_enforced
from commutator_engine_kit.constraints.llguidance import enforced, of_lark, written
from commutator_engine_kit.constraints.structural_tags import lark_of_tags, without_added_tokens

__all__ = [
    "check_enforced",
    "enforced",
    "lark_of_tags",
    "of_lark",
    "without_added_tokens",
    "written",
]
