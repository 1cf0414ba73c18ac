"""Compiles the messages of the protocol `kserve` (needs grpcio-tools): .proto to .binpb."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

FOLDER = Path(__file__).parents[1] / "plugins/protocols/kserve/src/commutator_kserve"


def compiled(source: Path, target: Path) -> None:
    """Write the serialized ``FileDescriptorSet`` of ``source``."""
    arguments = [f"-I{source.parent}", f"--descriptor_set_out={target}", source.name]
    if protoc.main(["protoc", *arguments]):
        sys.exit(f"{source} cannot be compiled")


if __name__ == "__main__":
    compiled(FOLDER / "inference.proto", FOLDER / "inference.binpb")
