"""A thread that adds peers has a GPU's context, without which UCX reads GPU memory by TCP."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from commutator.contract.tier import Memory, Region, Span
from commutator_engine_kit.nixl import agent as agents
from commutator_engine_kit.nixl.agent import TransferAgent
from commutator_engine_kit.nixl.library import make_gpu_current

CONTEXT = 4711


class Driver:
    """NVIDIA's driver, as far as it is asked: a context for each device, one current a thread."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.retained: list[int] = []
        self._current = threading.local()

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return self._status("cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        device._obj.value = ordinal + 100
        return self._status("cuDeviceGet")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        self.retained.append(device.value)
        context._obj.value = CONTEXT + device.value
        return self._status("cuDevicePrimaryCtxRetain")

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self.current
        return self._status("cuCtxGetCurrent")

    def cuCtxSetCurrent(self, context: Any) -> int:  # noqa: N802
        self._current.value = context.value
        return self._status("cuCtxSetCurrent")

    @property
    def current(self) -> int | None:
        return getattr(self._current, "value", None)

    def _status(self, called: str) -> int:
        return 100 if called == self.failing else 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    return made


def test_a_thread_gets_the_primary_context_of_the_device(driver: Driver) -> None:
    make_gpu_current(1)
    assert driver.current == CONTEXT + 101


def test_the_context_of_a_thread_that_has_one_stays(driver: Driver) -> None:
    driver.cuCtxSetCurrent(ctypes.c_void_p(5))
    make_gpu_current(1)
    assert driver.current == 5
    assert not driver.retained


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"])
def test_a_device_without_a_context_is_logged(
    driver: Driver, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    driver.failing = failing
    make_gpu_current(0)
    assert driver.current is None
    assert "GPU 0 has no context" in caplog.text


def test_nothing_is_done_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    make_gpu_current(0)


@pytest.mark.parametrize(("memory", "made"), [(Memory.VRAM, [3]), (Memory.DRAM, [])])
def test_an_agent_with_gpu_memory_makes_its_device_current_before_it_adds_a_peer(
    monkeypatch: pytest.MonkeyPatch, memory: Memory, made: list[int]
) -> None:
    calls: list[object] = []

    class Nixl:
        def register_memory(self, described: object, memory: str, backends: object) -> str:
            return "listed"

        def add_remote_agent(self, metadata: bytes) -> bytes:
            calls.append("added")
            return metadata

    monkeypatch.setattr(agents, "make_agent", lambda name: Nixl())
    monkeypatch.setattr(agents, "make_gpu_current", calls.append)
    agent = TransferAgent("reader", {})
    agent.register([Region(memory=memory, span=Span(4096, 4096, 3))], "UCX")
    agent.add_peer(b"lender")
    assert calls == [*made, "added"]
