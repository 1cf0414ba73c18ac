"""``python -m commutator.engine.start_with_model GGUF DIRECTORY SERVER...``: convert and serve."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from commutator.engine.model_directory import make_directory


def main() -> None:
    gguf, directory, *server = sys.argv[1:]
    try:
        make_directory(Path(gguf), Path(directory), server[0])
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(
            f"cannot convert {gguf}: {error}; the environment of {server[0]} needs torch, "
            "transformers, accelerate and gguf. Or give `models` a Hugging Face directory"
        )
    os.execv(server[0], server)  # noqa: S606 - this process becomes the server


if __name__ == "__main__":
    main()
