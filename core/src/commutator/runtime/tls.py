"""The TLS context of the front door."""

from __future__ import annotations

import ssl

from commutator.config.model import TlsConfig

__all__ = ["tls_context"]


def tls_context(tls: TlsConfig | None) -> ssl.SSLContext | None:
    """None without TLS. Raises OSError (ssl.SSLError is one) when the files cannot be used."""
    if tls is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert_file, tls.key_file)
    return context
