"""One request at two workers: its prefill at one, its decode at the other."""

from commutator.engine.handover.style import HandoverLegs, HandoverStyle, mismatch

__all__ = ["HandoverLegs", "HandoverStyle", "mismatch"]
