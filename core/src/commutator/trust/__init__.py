"""Proof that processes belong to the same run: its secret, the handshake, and who was refused."""

from commutator.trust.gate import ClientGate, Gate, ServerGate
from commutator.trust.handshake import Handshake, HandshakeError
from commutator.trust.refusals import note_refusal, refused_connections
from commutator.trust.secret import (
    SECRET_FILE,
    RunSecret,
    SecretFileError,
    adopt,
    proof_of_run,
    run_folder,
    secret_of_this_process,
)

__all__ = [
    "SECRET_FILE",
    "ClientGate",
    "Gate",
    "Handshake",
    "HandshakeError",
    "RunSecret",
    "SecretFileError",
    "ServerGate",
    "adopt",
    "note_refusal",
    "proof_of_run",
    "refused_connections",
    "run_folder",
    "secret_of_this_process",
]
