"""How KV bytes move: every one of them through NIXL, from here and nowhere else."""

from commutator.transfer.agent import TransferAgent
from commutator.transfer.lanes import lane_names, lanes_worth, shares, tapering
from commutator.transfer.move import BlockMoves, move_blocks
from commutator.transfer.nixl_library import load_nixl
from commutator.transfer.plan import BlockMove
from commutator.transfer.spans import Direction, Memory, Region, Span
from commutator.transfer.transfer import Transfer

__all__ = [
    "BlockMove",
    "BlockMoves",
    "Direction",
    "Memory",
    "Region",
    "Span",
    "Transfer",
    "TransferAgent",
    "lane_names",
    "lanes_worth",
    "load_nixl",
    "move_blocks",
    "shares",
    "tapering",
]
