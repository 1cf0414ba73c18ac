"""How the scheduler, on rank 0, asks the workers of all ranks what they can stage.

Each worker hears on a thread of its own: the engine's threads wait for the scheduler meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq

from commutator_trtllm.kv_words import Stage, Staged

__all__ = ["Ear", "Ranks"]

log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""The ear looks so often whether it shall end."""
_GRACE = 2.0
"""Answers come within so many times the time that the workers have."""
_LEAST_S = 0.05

_encode = msgspec.msgpack.Encoder().encode
_stage = msgspec.msgpack.Decoder(Stage)
_staged = msgspec.msgpack.Decoder(Staged)


class Ear:
    """Answers ``Stage`` with ``Staged``, one after another."""

    def __init__(self, answer: Callable[[Stage], Staged], host: str = "127.0.0.1") -> None:
        self._answer = answer
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        port: int = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = f"tcp://{host}:{port}"
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-ear", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        with self._socket as socket:
            while not self._ends.is_set():
                if not socket.poll(int(_LOOK_S * 1000)):
                    continue
                data = socket.recv()
                try:
                    stage = _stage.decode(data)
                except msgspec.MsgspecError:
                    log.warning("not a question of ours: %.40r", data)
                    socket.send(b"")
                    continue
                socket.send(_encode(self._staged(stage)))

    def _staged(self, stage: Stage) -> Staged:
        try:
            return self._answer(stage)
        except Exception:  # nothing is claimed then, and computed instead
            log.exception("nothing is staged for this prompt")
            return Staged(stage.number, 0)


class _Rank:
    """One worker, and the number of the question that it has not answered."""

    def __init__(self, address: str) -> None:
        self.open: int | None = None
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def ask(self, stage: Stage) -> None:
        self.socket.send(_encode(stage))
        self.open = stage.number

    def hear(self, wait_s: float) -> int:
        """The blocks of the open question; 0 when no answer comes in time."""
        if self.open is None or not self.socket.poll(int(wait_s * 1000)):
            return 0
        self.open = None
        with contextlib.suppress(msgspec.MsgspecError):
            return _staged.decode(self.socket.recv()).blocks
        return 0


class Ranks:
    """The workers of all ranks, as the scheduler's thread sees them."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._ranks = [_Rank(address) for address in addresses]

    def stage(self, stage: Stage) -> int:
        """How many blocks every rank has staged.

        0 when one does not answer. It is asked again once it has: nobody waits twice for one that
        is stuck.
        """
        for rank in self._ranks:
            rank.hear(0)
        if any(rank.open is not None for rank in self._ranks):
            return 0
        for rank in self._ranks:
            rank.ask(stage)
        end_s = time.monotonic() + _GRACE * stage.wait_s + _LEAST_S
        return min(rank.hear(max(0.0, end_s - time.monotonic())) for rank in self._ranks)

    def close(self) -> None:
        for rank in self._ranks:
            rank.socket.close()
