"""The options of the `nvme` tier."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from attrs import Attribute, frozen

from commutator import TierConfig, setting
from commutator.schema import ByteSize, Size

__all__ = ["Backend", "Direct", "Io", "NvmeConfig"]

Io = Literal["auto", "uring", "aio"]
Direct = Literal["auto", "on", "off"]
Backend = Literal["POSIX", "GDS", "GDS_MT"]


def _only_for_posix(config: NvmeConfig, attribute: Attribute[Any], value: str) -> None:
    if config.backend != "POSIX" and value != attribute.default:
        raise ValueError(f"{attribute.name}: has no effect with backend {config.backend}")


def _names_a_folder(_: NvmeConfig, attribute: Attribute[Any], value: str) -> None:
    """An empty one would be the current directory, which nobody means by it."""
    if not value.strip() or "\0" in value:
        raise ValueError(f"{attribute.name}: expected the path of a folder, got {value!r}")


@frozen(kw_only=True)
class NvmeConfig(TierConfig):
    """Where blocks are kept on disk, and how carefully."""

    path: str = setting(
        "Folder for the blocks; made when it is missing. {worker} stands for the worker's id, "
        "since no two processes may share one.",
        validator=_names_a_folder,
    )
    capacity: Size = setting("Room for blocks, taken at once; the index comes on top.")
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
        "Go past the page cache (O_DIRECT); auto does where the file system and the size of a "
        "block allow.",
        "auto",
    )
    durable: Literal["process", "power"] = setting(
        "What committed blocks survive: the death of the process, or of the machine, too, at the "
        "cost of a flush for each batch.",
        "process",
    )
    on_mismatch: Literal["refuse", "discard"] = setting(
        "What to do with blocks of another model or another geometry that lie in the folder.",
        "refuse",
    )
