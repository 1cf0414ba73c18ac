"""What one NIXL agent knows of memory, files and objects: each region once, however many use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define, field

from commutator.errors import TransferError
from commutator.transfer.nixl_library import nixl_errors
from commutator.transfer.spans import Region

__all__ = ["Registrations"]


@define
class Registrations:
    """Counts the users of each region, since NIXL itself does not."""

    _nixl: Any
    _held: dict[tuple[str, Region], tuple[Any, int]] = field(factory=dict)
    """NIXL's list for a region of a backend, and how many registered it."""

    def add(self, regions: Sequence[Region], backend: str) -> None:
        """Register all of them or, when it raises TransferError, none."""
        added: list[Region] = []
        try:
            for region in regions:
                self._add(region, backend)
                added.append(region)
        except TransferError:
            self.remove(added, backend)
            raise

    def remove(self, regions: Sequence[Region], backend: str) -> None:
        """Raises TransferError for a region that is not registered."""
        for region in regions:
            if (backend, region) not in self._held:
                raise TransferError(f"not registered with {backend}: {region}")
            listed, users = self._held.pop((backend, region))
            if users > 1:
                self._held[backend, region] = listed, users - 1
                continue
            with nixl_errors(f"deregister {region.memory} from {backend}"):
                self._nixl.deregister_memory(listed, [backend])

    def remove_all(self) -> None:
        """Let go of everything, as far as NIXL does."""
        while self._held:
            (backend, region), (listed, _) = self._held.popitem()
            with nixl_errors(f"deregister {region.memory} from {backend}"):
                self._nixl.deregister_memory(listed, [backend])

    def _add(self, region: Region, backend: str) -> None:
        listed, users = self._held.get((backend, region), (None, 0))
        if listed is None:
            span = region.span
            described = [(span.address, span.size_bytes, span.device, region.name)]
            with nixl_errors(f"register {span.size_bytes} B of {region.memory} with {backend}"):
                listed = self._nixl.register_memory(described, str(region.memory), [backend])
            if listed is None:
                raise TransferError(f"NIXL refused to register {region} with {backend}")
        self._held[backend, region] = listed, users + 1
