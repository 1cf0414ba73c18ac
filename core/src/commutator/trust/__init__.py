"""Proof that processes belong to the same run: its secret, the handshake, and who was refused."""

from commutator.trust.gate import ClientGate, Gate, ServerGate
from commutator.trust.handshake import Handshake, HandshakeError
from commutator.trust.identity import Identity, Right
from commutator.trust.network import (
    NETWORK,
    Network,
    TlsError,
    TlsFiles,
    is_loopback,
    network_of_this_process,
    use_network,
)
from commutator.trust.refusals import note_refusal, refused_connections, will_refuse
from commutator.trust.secret import (
    SECRET_FILE,
    RunSecret,
    SecretFileError,
    adopt,
    proof_of_run,
    run_folder,
    secret_of_this_process,
)
from commutator.trust.wire import (
    Listener,
    connect,
    host_and_port,
    in_url,
    listen,
    serve,
    unacknowledged_s,
)

__all__ = [
    "NETWORK",
    "SECRET_FILE",
    "ClientGate",
    "Gate",
    "Handshake",
    "HandshakeError",
    "Identity",
    "Listener",
    "Network",
    "Right",
    "RunSecret",
    "SecretFileError",
    "ServerGate",
    "TlsError",
    "TlsFiles",
    "adopt",
    "connect",
    "host_and_port",
    "in_url",
    "is_loopback",
    "listen",
    "network_of_this_process",
    "note_refusal",
    "proof_of_run",
    "refused_connections",
    "run_folder",
    "secret_of_this_process",
    "serve",
    "unacknowledged_s",
    "use_network",
    "will_refuse",
]
