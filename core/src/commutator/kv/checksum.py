"""One checksum for every stored byte: xxh3_64.

On blocks of 1 MiB, one core read by it 19 GB/s, as fast as numpy sums integers; crc32c, CRC-32
(zlib-ng, ISA-L) and BLAKE3 came to 17, 13 and 3.6, so that fewer bits would not be cheaper. It lets
go of the interpreter while it reads: blocks can be checked on one thread while another moves more.
It finds accidents; against an enemy who can write to a tier there is encryption.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import xxhash

__all__ = ["checksum"]

checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""xxh3_64 of a bytes-like object, as an unsigned integer."""
