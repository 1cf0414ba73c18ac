"""LoRA adapters by their content, as requests and the keys of KV name them."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from commutator.contract.request import AdapterIdentity
from commutator_engine_kit.model_identity import adapter_digest

_FILES = ("adapter_config.json", "adapter_model.safetensors")


def missing_files(source: str) -> str | None:
    """What the folder of an adapter lacks; None: nothing."""
    folder = Path(source)
    if not folder.is_dir():
        return f"there is no folder {source}"
    missing = [name for name in _FILES if not (folder / name).is_file()]
    return f"{source} has no {' and no '.join(missing)}" if missing else None


def identity(name: str, source: str) -> AdapterIdentity:
    """The adapter in a folder, of which every byte is read, once while the files stay the same.

    Raises OSError for a folder that cannot be read.
    """
    folder = Path(source).absolute()
    stats = [(file.name, file.stat()) for file in sorted(folder.iterdir())]
    state = tuple((name, one.st_mtime_ns, one.st_size, one.st_ino) for name, one in stats)
    return AdapterIdentity(name=name, digest=_digest(folder, state), source=str(folder))


@lru_cache(256)
def _digest(folder: Path, state: object) -> str:
    """``state`` changes with the files."""
    del state
    return adapter_digest(folder)
