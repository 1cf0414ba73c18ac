"""What outlives a registry in memory, in files: documents, and what operators want of workers."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
from attrs import field, frozen

from commutator.contract.registry import Document
from commutator.contract.worker import Role
from commutator.errors import RegistryError

StateT = TypeVar("StateT")

_VERSION_BITS = 48
"""Of the number at which versions begin: those of an earlier registry are none here."""


@frozen
class Documents:
    """All documents by name. No version is given twice."""

    by_name: Mapping[str, Document] = field(factory=dict)
    last_version: int = field(factory=lambda: secrets.randbits(_VERSION_BITS))

    def version(self, name: str) -> int:
        """Of the document; 0: there is none."""
        return 0 if (known := self.by_name.get(name)) is None else known.version

    def written(self, name: str, value: bytes, expected: int) -> Documents | None:
        """With a new value; None: the document's version is not ``expected``."""
        if self.version(name) != expected:
            return None
        document = Document(name=name, version=self.last_version + 1, value=value)
        return Documents({**self.by_name, name: document}, document.version)

    def deleted(self, name: str, expected: int) -> Documents | None:
        """Without the document; None: its version is not ``expected``, or there is none."""
        if not expected or self.version(name) != expected:
            return None
        rest = {other: document for other, document in self.by_name.items() if other != name}
        return Documents(rest, self.last_version)


def load_documents(path: Path) -> Documents:
    """What the file holds; nothing when there is none. Raises RegistryError."""
    decode = msgspec.msgpack.Decoder(Documents).decode
    return _load(path, decode, Documents, "the registry's documents")


def save_documents(path: Path, documents: Documents) -> None:
    """Replace the file's content. Raises RegistryError."""
    replace_file(path, msgspec.msgpack.encode(documents))


def _load(
    path: Path, decode: Callable[[bytes], StateT], nothing: Callable[[], StateT], what: str
) -> StateT:
    try:
        return decode(path.read_bytes())
    except FileNotFoundError:
        return nothing()
    except (OSError, msgspec.MsgspecError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise RegistryError(
            f"registry.state_file: {path}: {problem}; remove it to forget {what}"
        ) from error


def replace_file(path: Path, content: bytes) -> None:
    """Replace a state file's content at once, so that no crash leaves half of it.

    Raises RegistryError.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        with draft.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError as error:
        raise RegistryError(f"registry.state_file: {path}: {error.strerror}") from error


@frozen
class Desired:
    """What outlives leases. Worker ids stay in it until their workers are retired."""

    draining: frozenset[str] = frozenset()
    """Ids of workers that are drained until they are undrained."""
    roles: Mapping[str, Role] = field(factory=dict)
    """Roles that were changed, by worker id; they replace what the worker registers with."""


def load_desired(path: Path) -> Desired:
    """What the file holds; nothing when there is none. Raises RegistryError."""
    return _load(path, msgspec.json.Decoder(Desired).decode, Desired, "roles and draining")


def save_desired(path: Path, desired: Desired) -> None:
    """Replace the file's content. Raises RegistryError."""
    values = {"draining": sorted(desired.draining), "roles": dict(desired.roles)}
    replace_file(path, msgspec.json.format(msgspec.json.encode(values)) + b"\n")
