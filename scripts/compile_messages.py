"""Compiles the messages of plugins that speak gRPC (needs grpcio-tools): .proto to .binpb."""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

PLUGINS = Path(__file__).parents[1] / "plugins"


def compiled(source: Path, target: Path) -> None:
    """Write the serialized ``FileDescriptorSet`` of ``source``."""
    arguments = [f"-I{source.parent}", f"--descriptor_set_out={target}", source.name]
    if protoc.main(["protoc", *arguments]):
        sys.exit(f"{source} cannot be compiled")


if __name__ == "__main__":
    for found in sorted(PLUGINS.glob("*/*/src/*/*.proto")):
        compiled(found, found.with_suffix(".binpb"))
