"""Unpacks compressed bodies: only where somebody wants them, in small pieces, up to a ratio."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from aiohttp import web
from aiohttp.compression_utils import (
    HAS_BROTLI,
    HAS_ZSTD,
    BrotliDecompressor,
    ZLibDecompressor,
    ZSTDDecompressor,
)

MOST_TIMES_LARGER = 100
"""Text becomes some 5 times smaller; Envoy's decompressor stops at the same ratio."""
_FREE_BYTES = 1 << 20
"""A body of this size may come from any number of bytes: the same words over and over are fair."""
_PIECE_BYTES = 64 << 10
"""Unpacking this much takes some 0.2 ms."""

_DEFLATE = 8
"""The method in zlib's header (RFC 1950)."""

_Decompressor = ZLibDecompressor | BrotliDecompressor | ZSTDDecompressor
_MAKERS: dict[str, Callable[[], _Decompressor]] = {
    "gzip": lambda: ZLibDecompressor(encoding="gzip"),
    "x-gzip": lambda: ZLibDecompressor(encoding="gzip"),
    "deflate": lambda: ZLibDecompressor(encoding="deflate"),
}
if HAS_BROTLI:
    _MAKERS["br"] = BrotliDecompressor
if HAS_ZSTD:
    _MAKERS["zstd"] = ZSTDDecompressor

CODINGS = tuple(_MAKERS)
"""What ``Content-Encoding`` may say here; ``br`` and ``zstd`` need their packages."""


class InflateError(Exception):
    """A body is not of its coding, is cut off, or becomes far larger than it is."""


class Inflater:
    """One body of one of the ``CODINGS``."""

    def __init__(self, coding: str, max_bytes: int) -> None:
        """``max_bytes``: what the body may become."""
        self._coding = coding
        self._max_bytes = max_bytes
        self._decompressor = _MAKERS[coding]()
        self._read_bytes = 0
        self._made = bytearray()

    def pieces(self, data: bytes) -> Iterator[None]:
        """Unpack ``data``, the next bytes of the body, 64 KiB at each step.

        Raises InflateError, and HTTPRequestEntityTooLarge.
        """
        first = not self._read_bytes and self._coding == "deflate"
        if first and data and data[0] & 0xF != _DEFLATE:
            # Some clients send the bare stream, without zlib's header (RFC 9110, 8.4.1.2).
            self._decompressor = ZLibDecompressor(encoding="deflate", suppress_deflate_header=True)
        self._read_bytes += len(data)
        more = True
        while more:
            try:
                piece = self._decompressor.decompress_sync(data, max_length=_PIECE_BYTES)
            except Exception as error:  # each library has its own
                raise InflateError(f"it is not {self._coding}: {error}") from error
            data = b""
            more = self._decompressor.data_available
            self._made += piece
            size = len(self._made)
            if size > self._max_bytes:
                raise web.HTTPRequestEntityTooLarge(max_size=self._max_bytes, actual_size=size)
            if size > max(_FREE_BYTES, MOST_TIMES_LARGER * self._read_bytes):
                raise InflateError(
                    f"it becomes more than {MOST_TIMES_LARGER} times larger when unpacked; "
                    "send it without Content-Encoding"
                )
            yield

    def end(self) -> bytes:
        """The whole body. Raises InflateError if it was cut off."""
        whole = not isinstance(self._decompressor, ZLibDecompressor) or self._decompressor.eof
        if self._coding == "deflate" and not whole:
            raise InflateError("it ends too early")
        return bytes(self._made)
