"""The options of the `nvme` tier."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator import Memory, Size, TierConfig, setting
from commutator.schema import ByteSize

Io = Literal["auto", "uring", "aio"]
Direct = Literal["auto", "on", "off"]
Backend = Literal["POSIX", "GDS", "GDS_MT"]


def _only_for_posix(config: NvmeConfig, attribute: Attribute[Any], value: str) -> None:
    if config.backend != "POSIX" and value != attribute.default:
        raise ValueError(f"{attribute.name}: has no effect with backend {config.backend}")


def _names_a_folder(_: NvmeConfig, attribute: Attribute[Any], value: str) -> None:
    """Refuses an empty path, which would be the current directory."""
    if not value.strip() or "\0" in value:
        raise ValueError(f"{attribute.name}: expected the path of a folder, got {value!r}")


@frozen(kw_only=True)
class NvmeConfig(TierConfig):
    """Options of the `nvme` tier: where blocks are on disk, and what they survive."""

    memory = Memory.FILE

    path: str = setting(
        "Folder for the blocks, of this user alone; created with mode 0700 if it is missing. ~ is "
        "the user's home. {worker} is replaced by the worker's id, because no two processes may "
        "share a folder.",
        validator=_names_a_folder,
    )
    capacity: Size = setting("Disk space for blocks, allocated at once; the index takes more.")
    segment_size: Annotated[int, ByteSize(minimum=1 << 20)] = setting("Size of one file.", 16 << 30)
    backend: Backend = setting(
        "The NIXL backend: POSIX, or GDS and GDS_MT for a GPU with GPUDirect storage.", "POSIX"
    )
    io: Io = setting(
        "How the POSIX backend reads and writes; auto tries io_uring, then Linux AIO.",
        "auto",
        validator=_only_for_posix,
    )
    direct: Direct = setting(
        "Bypass the page cache (O_DIRECT); auto does so where the file system and the size of a "
        "block allow it.",
        "auto",
    )
    durable: Literal["process", "power"] = setting(
        "What committed blocks survive: the end of the process, or also a power failure, at the "
        "cost of a flush for each batch.",
        "process",
    )
    on_mismatch: Literal["refuse", "discard"] = setting(
        "What to do when the folder has blocks of another model or another geometry.",
        "refuse",
    )
