"""What operators want of workers, in a file: it outlives the registry in a supervisor's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
from attrs import field, frozen

from commutator.contract.worker import Role
from commutator.errors import RegistryError
from commutator.registry.documents import replace_file

__all__ = ["Desired", "load_desired", "save_desired"]


@frozen
class Desired:
    """What outlives leases. Worker ids stay in it until their workers are retired."""

    draining: frozenset[str] = frozenset()
    """Ids of workers that are drained until they are undrained."""
    roles: Mapping[str, Role] = field(factory=dict)
    """Roles that were changed, by worker id; they replace what the worker registers with."""


def load_desired(path: Path) -> Desired:
    """What the file holds; nothing when there is none. Raises RegistryError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Desired)
    except FileNotFoundError:
        return Desired()
    except (OSError, msgspec.MsgspecError) as error:
        what = error.strerror if isinstance(error, OSError) else error
        raise RegistryError(
            f"registry.state_file: {path}: {what}; remove it to forget roles and draining"
        ) from error


def save_desired(path: Path, desired: Desired) -> None:
    """Replace the file's content. Raises RegistryError."""
    values = {"draining": sorted(desired.draining), "roles": dict(desired.roles)}
    replace_file(path, msgspec.json.format(msgspec.json.encode(values)) + b"\n")
