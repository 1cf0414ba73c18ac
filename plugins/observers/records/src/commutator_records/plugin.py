"""Registers the observers of kinds `audit` and `recording`."""

from __future__ import annotations

from commutator import hookimpl
from commutator.contract.registration import ObserverRegister
from commutator_records.audit import AuditConfig, AuditLog
from commutator_records.recording import RecordingConfig, TraceRecorder


@hookimpl
def observer_register(register: ObserverRegister) -> None:
    """Kinds `audit`: a line for each request of a client; `recording`: a trace to replay."""
    register("audit", AuditConfig, AuditLog, "beta")
    register("recording", RecordingConfig, TraceRecorder, "beta")
