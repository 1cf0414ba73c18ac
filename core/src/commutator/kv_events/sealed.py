"""Proof that a message on an event bus comes from a process of this run.

A bus is shared: who can publish on it must not be able to make front doors believe events, and who
can ask on it must get no replay. A seal hides nothing: who can read the bus reads the events.
"""

from __future__ import annotations

from hmac import compare_digest

from commutator.trust import note_refusal, proof_of_run

__all__ = ["SEAL_BYTES", "seal_message", "unseal_message"]

SEAL_BYTES = 32
"""How much longer a sealed message is."""
_PURPOSE = "event bus"


def seal_message(place: str, message: bytes) -> bytes:
    """``message`` with the proof that a process of this run sent it at ``place``, a subject."""
    return proof_of_run(_PURPOSE, place.encode(), message) + message


def unseal_message(place: str, sealed: bytes) -> bytes | None:
    """The message that ``seal_message`` was given; None, and counted, if it was not sealed so."""
    proof, message = sealed[:SEAL_BYTES], sealed[SEAL_BYTES:]
    if compare_digest(proof, proof_of_run(_PURPOSE, place.encode(), message)):
        return message
    note_refusal(_PURPOSE, place, "the message was not sealed with this run's secret")
    return None
