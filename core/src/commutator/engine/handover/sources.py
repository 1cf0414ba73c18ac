"""The decode side's connections to prefill workers, and who each of them is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
from attrs import define, field

from commutator.engine.handover.pull_words import Source
from commutator.errors import EngineHandoverError

__all__ = ["HandoverClient", "Sources"]


class HandoverClient(Protocol):
    """What is needed of a client of the token API."""

    @property
    def connected(self) -> bool: ...

    async def start(self) -> object: ...

    async def handover(
        self, what: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> Any: ...

    async def close(self) -> None: ...


@define(eq=False)
class _Peer:
    client: HandoverClient
    source: Source | None = None
    connecting: asyncio.Lock = field(factory=asyncio.Lock)


class Sources:
    """One connection for each prefill worker, made when needed. Used from one event loop."""

    def __init__(
        self,
        connect: Callable[[str], HandoverClient],
        *,
        forget: Callable[[Source], None],
        hello_timeout_s: float,
    ) -> None:
        """``forget`` is told of processes that are not there any more."""
        self._connect = connect
        self._forget = forget
        self._hello_timeout_s = hello_timeout_s
        self._peers: dict[str, _Peer] = {}

    async def ask(
        self, address: str, what: str, arguments: Mapping[str, Any], *, timeout_s: float
    ) -> Any:
        """A question to that worker, which may have to be connected to. Raises EngineError."""
        peer = self._peer(address)
        async with peer.connecting:
            await peer.client.start()
        return await peer.client.handover(what, arguments, timeout_s=timeout_s)

    async def source(self, address: str) -> Source:
        """Who is there; asked once for each connection. Raises EngineError."""
        peer = self._peer(address)
        async with peer.connecting:
            if peer.source is not None and peer.client.connected:
                return peer.source
            await peer.client.start()
            answer = await peer.client.handover("hello", {}, timeout_s=self._hello_timeout_s)
            try:
                found = msgspec.convert(answer, Source)
            except msgspec.ValidationError as error:
                raise EngineHandoverError(
                    f"worker at {address} does not say where its blocks are: {error}"
                ) from error
            if peer.source is not None and peer.source != found:
                self._forget(peer.source)
            peer.source = found
        await self._forget_lost()
        return found

    async def close(self) -> None:
        """Disconnect from all of them."""
        peers, self._peers = self._peers, {}
        for peer in peers.values():
            await peer.client.close()

    async def _forget_lost(self) -> None:
        """Workers come and go: keep nothing of those whose connection is gone."""
        for address, peer in list(self._peers.items()):
            idle = not peer.client.connected and not peer.connecting.locked()
            # While another was being closed, this one may have gone, and come again.
            if peer.source is not None and idle and self._peers.get(address) is peer:
                del self._peers[address]
                self._forget(peer.source)
                await peer.client.close()

    def _peer(self, address: str) -> _Peer:
        peer = self._peers.get(address)
        if peer is None:
            peer = self._peers[address] = _Peer(self._connect(address))
        return peer
