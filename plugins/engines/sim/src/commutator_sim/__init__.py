"""A simulated engine: a pure model in virtual time, and the server that drives it."""

from commutator_sim.config import SimConfig, SimParameters, SimTier, TierParameters
from commutator_sim.events import (
    DEVICE,
    Event,
    Finished,
    FirstToken,
    Offloaded,
    Preempted,
    Pulled,
    Pulling,
    Ready,
    Removed,
    Steps,
    Stored,
)
from commutator_sim.model import SimModel
from commutator_sim.request import SimRequest

__all__ = [
    "DEVICE",
    "Event",
    "Finished",
    "FirstToken",
    "Offloaded",
    "Preempted",
    "Pulled",
    "Pulling",
    "Ready",
    "Removed",
    "SimConfig",
    "SimModel",
    "SimParameters",
    "SimRequest",
    "SimTier",
    "Steps",
    "Stored",
    "TierParameters",
]
