"""Whose waiting request is next: what a fairness plugin implements.

Core brings the kinds `weighted`, the default, and `fifo`.
"""

from commutator.contract.fairness import FairnessConfig, FairnessPolicy
from commutator.contract.registration import FairnessRegister

__all__ = [
    "FairnessConfig",
    "FairnessPolicy",
    "FairnessRegister",
]
