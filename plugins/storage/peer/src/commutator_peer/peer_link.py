"""The connection to one peer: questions, answers, and what the peer was when it last answered."""

from __future__ import annotations

import logging

import zmq

from commutator.kv import (
    Breaker,
    PeerAnswer,
    PeerAsk,
    PeerRelease,
    decode_peer_message,
    encode_peer_message,
)

__all__ = ["PeerLink"]

log = logging.getLogger(__name__)

_QUEUED = 64
"""Messages that may wait for a peer that is away; more are dropped."""


class PeerLink:
    """Never waits. Belongs to the tier's thread."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, breaker: Breaker
    ) -> None:
        self.address = address
        self.breaker = breaker
        self._asked: int | None = None
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.sndhwm = _QUEUED
        self.socket.connect(address)

    def ask(self, question: PeerAsk) -> None:
        self._asked = question.number if self._send(encode_peer_message(question)) else None

    def release(self, lease: int, slots: list[int]) -> None:
        """Give leased slots back. If that gets lost, the lease ends by itself."""
        if slots:
            self._send(encode_peer_message(PeerRelease(lease=lease, slots=slots)))

    def receive(self) -> PeerAnswer | None:
        """The answer to the last question, if it has come.

        Late answers to older ones are given back: nobody waits for them any more.
        """
        while True:
            try:
                data = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return None
            try:
                answer = decode_peer_message(data)
            except ValueError as error:
                log.warning("peer %s sent what is no answer: %s", self.address, error)
                continue
            if not isinstance(answer, PeerAnswer):
                continue
            if answer.number == self._asked:
                self._asked = None
                self.breaker.succeeded()
                return answer
            self.release(answer.lease, [block.slot for block in answer.blocks])

    def missed(self, now_s: float) -> None:
        """It did not answer in time."""
        self._asked = None
        self.breaker.failed(now_s)

    def close(self) -> None:
        self.socket.close()

    def _send(self, data: bytes) -> bool:
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True
