"""Stages blocks in host memory on all ranks, before the engine claims them.

The scheduler, on rank 0, has the workers of all ranks load and verify a prompt's blocks. Each
worker answers on a separate thread, because the engine's threads wait for the scheduler.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

import msgspec
import zmq
from attrs import frozen

from commutator.kv_events import bind_private
from commutator_engine_kit.kv import KvConnector, OnboardTicket

log = logging.getLogger(__name__)

_GRACE = 0.5
"""Share of a load's time limit that a cancelled load may take to end."""
_CLOSE_CHECK_S = 0.2
"""How often a StageServer checks whether it was closed."""
_ANSWER_GRACE = 2.0
"""Answers may take this many times the time limit of the workers."""
_MIN_WAIT_S = 0.05


@frozen
class Stage:
    """Load a prompt's blocks into host memory, before the engine claims them."""

    number: int
    token_ids: tuple[int, ...]
    """The tokens of the prompt's full blocks, up to the last block that is wanted."""
    cache_salt: str | None
    first: int
    """Position in the chain of the first block that is wanted."""
    wait_s: float
    """Time limit in seconds; blocks that arrive later are not claimed."""


@frozen
class Staged:
    """The answer to a Stage: ``blocks`` blocks are in host memory and verified."""

    number: int
    blocks: int


_encode = msgspec.msgpack.Encoder().encode
_stage = msgspec.msgpack.Decoder(Stage)
_staged = msgspec.msgpack.Decoder(Staged)


class HostBlocks:
    """The free blocks of the host memory, by number. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._lock = threading.Lock()
        self.count = count

    def take(self, count: int, *, leave: int = 0) -> list[int]:
        """Take up to ``count`` blocks, leaving at least ``leave`` free."""
        with self._lock:
            count = max(0, min(count, len(self._free) - leave))
            taken = self._free[len(self._free) - count :]
            del self._free[len(self._free) - count :]
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        with self._lock:
            self._free += blocks

    @property
    def free(self) -> int:
        return len(self._free)


class Claims:
    """Stages blocks in host memory and hands them out.

    ``stage`` is called on the StageServer's thread, the other methods on the engine's.
    """

    def __init__(self, connector: KvConnector, host: HostBlocks) -> None:
        self._connector = connector
        self._host = host
        self._lock = threading.Lock()
        self._staged: dict[int, list[int]] = {}
        self._dropped: set[int] = set()
        """Claims that were dropped before they were staged."""

    def stage(self, wanted: Stage) -> Staged:
        """Load and verify blocks within the time limit; hold them until ``take`` or ``drop``."""
        end_s = time.monotonic() + wanted.wait_s
        blocks = self._load(wanted, end_s)
        with self._lock:
            if wanted.number not in self._dropped:
                self._staged[wanted.number] = blocks
                return Staged(wanted.number, len(blocks))
            # Numbers arrive in order, so smaller ones will not come any more.
            self._dropped = {number for number in self._dropped if number > wanted.number}
        self._host.give(blocks)
        return Staged(wanted.number, 0)

    def take(self, number: int) -> list[int]:
        """The blocks of a claim, in order. The caller gives them back to HostBlocks."""
        with self._lock:
            return self._staged.pop(number)

    def drop(self, number: int) -> None:
        """Free the blocks of a claim, now or once they are staged."""
        with self._lock:
            blocks = self._staged.pop(number, None)
            if blocks is None:
                self._dropped.add(number)
                return
        self._host.give(blocks)

    def _load(self, wanted: Stage, end_s: float) -> list[int]:
        keys = self._connector.lookups.keys(wanted.token_ids, cache_salt=wanted.cache_salt)
        plan = self._plan(self._connector.lookups.plan(keys, first=wanted.first), end_s)
        if plan is None or not plan.blocks:
            return []
        blocks = self._host.take(plan.blocks)
        if not blocks:
            self._connector.loads.cancel(plan)
            return []
        load = self._connector.loads.onboard(plan, blocks)
        good = _within(load, end_s - time.monotonic())
        if good is None:
            self._connector.loads.cancel(plan)
            good = _within(load, wanted.wait_s * _GRACE)
        if good is None:  # the tier may still write there
            load.add_done_callback(partial(self._ended, blocks))
            return []
        count = good.index(False) if False in good else len(good)
        self._host.give(blocks[count:])
        return blocks[:count]

    def _ended(self, blocks: Iterable[int], load: Future[list[bool]]) -> None:
        if load.exception() is None:  # otherwise the tier may still write there
            self._host.give(blocks)

    def _plan(self, plan: Future[OnboardTicket], end_s: float) -> OnboardTicket | None:
        try:
            return plan.result(max(0.0, end_s - time.monotonic()))
        except (FutureTimeout, CancelledError):
            if not plan.cancel():
                self._connector.loads.cancel(plan.result())
            return None


def _within(load: Future[list[bool]], wait_s: float) -> list[bool] | None:
    """The result of ``load``; None when it has not ended in time."""
    try:
        return load.result(max(0.0, wait_s))
    except FutureTimeout:
        return None


class StageServer:
    """Answers each ``Stage`` with a ``Staged``, one after another, on its own thread.

    It listens in the run's private folder; a server started by hand listens at ``host``.
    """

    def __init__(self, answer: Callable[[Stage], Staged], host: str = "127.0.0.1") -> None:
        self._answer = answer
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self.address = bind_private(self._socket, host)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-stage", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket as socket:
            while not self._closed.is_set():
                if not socket.poll(int(_CLOSE_CHECK_S * 1000)):
                    continue
                data = socket.recv()
                try:
                    stage = _stage.decode(data)
                except msgspec.MsgspecError:
                    log.warning("KV connector: received an unknown message: %.40r", data)
                    socket.send(b"")
                    continue
                socket.send(_encode(self._staged(stage)))

    def _staged(self, stage: Stage) -> Staged:
        try:
            return self._answer(stage)
        except Exception:  # no block is claimed, and the prompt is computed
            log.exception("KV connector: staging blocks of a prompt failed")
            return Staged(stage.number, 0)


class _Rank:
    """The connection to one worker, and the number of the Stage that it has not answered."""

    def __init__(self, address: str) -> None:
        self.open: int | None = None
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def send(self, stage: Stage) -> None:
        self.socket.send(_encode(stage))
        self.open = stage.number

    def receive(self, wait_s: float) -> int:
        """The blocks staged for the open Stage; 0 when no answer arrives in time."""
        if self.open is None or not self.socket.poll(int(wait_s * 1000)):
            return 0
        self.open = None
        with contextlib.suppress(msgspec.MsgspecError):
            return _staged.decode(self.socket.recv()).blocks
        return 0


class Ranks:
    """The workers of all ranks. Called on the scheduler's thread."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._ranks = [_Rank(address) for address in addresses]

    def stage(self, stage: Stage) -> int:
        """How many blocks every rank has staged.

        0 when a rank does not answer in time. Until its answer has arrived, later calls return 0 at
        once, so that the scheduler does not wait again for a rank that is stuck.
        """
        for rank in self._ranks:
            rank.receive(0)
        if any(rank.open is not None for rank in self._ranks):
            return 0
        for rank in self._ranks:
            rank.send(stage)
        end_s = time.monotonic() + _ANSWER_GRACE * stage.wait_s + _MIN_WAIT_S
        return min(rank.receive(max(0.0, end_s - time.monotonic())) for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:
            rank.socket.close()
