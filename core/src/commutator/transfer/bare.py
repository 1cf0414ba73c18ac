"""NIXL with nothing around it, to measure against: one request for everything, and its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from commutator.errors import TransferError
from commutator.transfer.nixl_library import make_agent, nixl_errors
from commutator.transfer.spans import Direction, Memory, Region, Span

__all__ = ["BareNixl"]


class BareNixl:
    """An agent of its own for one backend. Checks nothing, and spins while it waits."""

    def __init__(
        self, name: str, backend: str, parameters: Mapping[str, str], regions: Sequence[Region]
    ) -> None:
        """Raises TransferError when NIXL is not there, or refuses."""
        self._name = name
        self._backend = backend
        self._nixl = make_agent(name)
        with nixl_errors(f"set {name} up"):
            self._nixl.create_backend(backend, dict(parameters))
            self._registered = [
                self._nixl.register_memory(
                    [(r.span.address, r.span.size_bytes, r.span.device, r.name)],
                    str(r.memory),
                    [backend],
                )
                for r in regions
            ]

    def move(
        self, direction: Direction, local: Sequence[Span], remote: Sequence[Span], memory: Memory
    ) -> None:
        """Between DRAM and ``remote``, span by span. Raises TransferError."""
        with nixl_errors(f"move {len(local)} spans"):
            handle = self._nixl.initialize_xfer(
                str(direction),
                self._nixl.get_xfer_descs(_tuples(local), str(Memory.DRAM)),
                self._nixl.get_xfer_descs(_tuples(remote), str(memory)),
                self._name,
                b"",
                [self._backend],
            )
            state = self._nixl.transfer(handle)
            while state == "PROC":
                state = self._nixl.check_xfer_state(handle)
            handle.release()
        if state != "DONE":
            raise TransferError(f"bare NIXL ended a transfer with {state}")

    def close(self) -> None:
        """Let go of what was registered."""
        with nixl_errors(f"close {self._name}"):
            for registered in self._registered:
                self._nixl.deregister_memory(registered, [self._backend])


def _tuples(spans: Sequence[Span]) -> list[tuple[int, int, int]]:
    return [(span.address, span.size_bytes, span.device) for span in spans]
