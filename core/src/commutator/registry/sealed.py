"""Seals values that are kept outside of the run: only its processes can write them.

Who else can write to the store, such as other users of the same etcd, cannot announce a worker, or
drain one: what they write is refused. A seal proves who wrote a value, under which key; it hides
nothing, and does not keep an old value from being put back.
"""

from __future__ import annotations

from hmac import compare_digest

from commutator.trust import proof_of_run

__all__ = ["seal", "unseal"]

_PURPOSE = "registry value"


def seal(key: bytes, value: bytes) -> bytes:
    """``value`` with the proof that a process of this run wrote it under ``key``."""
    return proof_of_run(_PURPOSE, key, value).hex().encode() + b" " + value


def unseal(key: bytes, sealed: bytes) -> bytes | None:
    """The value that ``seal`` was given; None when no process of this run wrote it there."""
    mac, _, value = sealed.partition(b" ")
    return value if compare_digest(mac, proof_of_run(_PURPOSE, key, value).hex().encode()) else None
