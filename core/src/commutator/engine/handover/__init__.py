"""One request at two workers: its prefill at one, its decode at the other.

``style`` is the contract of every engine. The rest is our own engines' way, see ``pull_words``.
"""

from commutator.engine.handover.export_server import ExportServer
from commutator.engine.handover.geometry import BlockShapes
from commutator.engine.handover.handover_keys import handover_keys
from commutator.engine.handover.mover import BlockMover, PromptBlock, Target
from commutator.engine.handover.nixl_mover import NixlMover
from commutator.engine.handover.pull import PullTimes
from commutator.engine.handover.pull_style import LEASE_S, PROTOCOL, PullHandover
from commutator.engine.handover.pull_words import (
    DecodeWords,
    PrefillWords,
    ReadyBlock,
    Source,
    read_words,
)
from commutator.engine.handover.puller import Puller, PullOver
from commutator.engine.handover.statistics import (
    ExportStatistics,
    HandoverStatistics,
    PullStatistics,
)
from commutator.engine.handover.style import HandoverLegs, HandoverStyle, mismatch

__all__ = [
    "LEASE_S",
    "PROTOCOL",
    "BlockMover",
    "BlockShapes",
    "DecodeWords",
    "ExportServer",
    "ExportStatistics",
    "HandoverLegs",
    "HandoverStatistics",
    "HandoverStyle",
    "NixlMover",
    "PrefillWords",
    "PromptBlock",
    "PullHandover",
    "PullOver",
    "PullStatistics",
    "PullTimes",
    "Puller",
    "ReadyBlock",
    "Source",
    "Target",
    "handover_keys",
    "mismatch",
    "read_words",
]
