"""Proof that processes belong to the same run: its secret, the handshake, and who was refused."""

from commutator.trust.gate import ClientGate, Gate, ServerGate
from commutator.trust.handshake import Handshake, HandshakeError
from commutator.trust.refusals import refused_connections
from commutator.trust.secret import (
    SECRET_FILE,
    RunSecret,
    SecretFileError,
    adopt,
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
    "refused_connections",
    "run_folder",
    "secret_of_this_process",
]
