"""How KV bytes move: every one of them through NIXL, from here and nowhere else."""

from commutator.transfer.spans import Memory, Region, Span

__all__ = ["Memory", "Region", "Span"]
