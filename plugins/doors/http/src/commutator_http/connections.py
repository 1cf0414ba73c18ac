"""Accepts connections, bounds how many there are, and closes those whose clients keep it waiting.

A connection *waits for its client* while no request has arrived completely: a new one, one that is
kept alive, one with half a header or half a body, one that does not read its answer. When the door
is full, the connection that has waited longest makes room for a new one; connections that never
sent a key that is known here go first. If none waits, a few more connections are accepted, on which
only probes are answered.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from attrs import define, field

log = logging.getLogger(__name__)

_FOR_PROBES = 16
_OWN_DESCRIPTORS = 64
_FEWEST = 8
_PER_TURN = 250
_DROPPED_PER_TURN = 8
_HANDSHAKE_S = 10.0
_PAUSE_S = 0.05
_OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
_IPV6_PREFIX_BITS = 64
_WINDOW_S = 60.0
_LINES = 10
"""That one kind of event may write in a minute."""
_ADDRESSES = 1024
"""That are told apart in a minute; what others do counts, too, but not whose it was."""


def most_connections(wanted: int, descriptors: int | None = None) -> int:
    """``wanted``, or as many as the limit of open files leaves room for, if that is less.

    Descriptors are left for workers, logs and probes. ``descriptors`` is the limit of the process.
    """
    if descriptors is None:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return wanted
    return min(wanted, max(_FEWEST, descriptors - _OWN_DESCRIPTORS - _FOR_PROBES))


@define(eq=False)
class Connection:
    """One accepted connection."""

    address: str
    """What the limit per address counts by; empty where there is none."""
    close: Callable[[], None] = field(default=lambda: None)
    """Closes it at once, whatever it does."""
    over: bool = False
    """Closed, or about to be."""
    is_known: bool = False
    """A request on it had a key that is known here. Set while a request is answered."""
    probes_only: bool = False
    """Accepted beyond the limits: only ``/live`` and its like are answered."""


class ConnectionTable:
    """Decides which connections are accepted, and which are closed for them. Opens no socket."""

    def __init__(
        self,
        most: int,
        most_per_address: int = 0,
        for_probes: int = _FOR_PROBES,
        on_drop: Callable[[str, str], None] = lambda _reason, _address: None,
    ) -> None:
        """``most_per_address`` 0 means no limit. ``for_probes`` come on top of ``most``.

        ``on_drop`` is given the reason and the address of each connection that is closed to make
        room, or not accepted, or closed for what its client does.
        """
        self.on_drop = on_drop
        self._most = most
        self._most_per_address = most_per_address
        self._for_probes = for_probes
        self._by_address: Counter[str] = Counter()
        # Ordered by when they began to wait for their clients.
        self._waiting: dict[Connection, None] = {}
        self._waiting_known: dict[Connection, None] = {}
        self._waiting_probes: dict[Connection, None] = {}
        self.open = 0
        """Connections that hold one of the ``most`` places."""
        self.probes = 0
        self.dropped = 0
        """Connections closed to make room, or not accepted at all."""

    def admit(self, address: str) -> Connection | None:
        """Count a new connection, which waits for its client; None if it has to be closed.

        May close another one.
        """
        full_for_address = 0 < self._most_per_address <= self._by_address[address]
        if not full_for_address and (self.open < self._most or self.make_room("full")):
            connection = Connection(address)
            self.open += 1
            self._by_address[address] += 1
        elif self.probes < self._for_probes or self._drop_oldest(
            self._waiting_probes, "full_for_probes"
        ):
            connection = Connection(address, probes_only=True)
            self.probes += 1
        else:
            self.dropped += 1
            self.on_drop("full_for_address" if full_for_address else "not_accepted", address)
            return None
        self.waits(connection)
        return connection

    def waits(self, connection: Connection) -> None:
        """``connection`` waits for its client from now on."""
        if connection.probes_only:
            self._waiting_probes[connection] = None
        elif connection.is_known:
            self._waiting_known[connection] = None
        else:
            self._waiting[connection] = None

    def works(self, connection: Connection) -> None:
        """``connection`` has sent what it had to; it is not closed for another one."""
        self._waiting.pop(connection, None)
        self._waiting_known.pop(connection, None)
        self._waiting_probes.pop(connection, None)

    def closed(self, connection: Connection) -> None:
        """Give the place of ``connection`` back; a second call does nothing."""
        if connection.over:
            return
        connection.over = True
        self.works(connection)
        if connection.probes_only:
            self.probes -= 1
            return
        self.open -= 1
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def make_room(self, reason: str) -> bool:
        """Close the connection that has waited longest for its client; False if none waits."""
        return self._drop_oldest(self._waiting, reason) or self._drop_oldest(
            self._waiting_known, reason
        )

    def _drop_oldest(self, waiting: dict[Connection, None], reason: str) -> bool:
        oldest = next(iter(waiting), None)
        if oldest is None:
            return False
        self.dropped += 1
        self.on_drop(reason, oldest.address)
        self.closed(oldest)
        oldest.close()
        return True


class Listener:
    """Accepts the connections of some listening sockets, many in one turn of the event loop.

    uvloop's own servers take one connection a turn, so that 512 new ones wait for seconds while as
    many streams keep the loop busy.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        table: ConnectionTable,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        context: ssl.SSLContext | None,
    ) -> None:
        self.sockets = tuple(sockets)
        self._table = table
        self._make_protocol = make_protocol
        self._context = context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}

    def start(self) -> None:
        for listening in self.sockets:
            listening.setblocking(False)
            self._loop.add_reader(listening, self._accept, listening)

    def stop(self) -> None:
        """Accept what waits in the queues, and close the listening sockets."""
        for listening in self.sockets:
            if listening.fileno() < 0:
                continue
            if (timer := self._paused.pop(listening, None)) is not None:
                timer.cancel()
            self._loop.remove_reader(listening)
            try:
                while self._accept_some(listening):
                    pass
            except OSError as error:
                log.warning("connections in the queue are lost: %s", error)
            listening.close()

    async def close(self) -> None:
        """Stop, and end connections that are still being set up."""
        self.stop()
        for task in self._opening:
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        try:
            self._accept_some(listening)
        except OSError as error:
            if error.errno not in _OUT_OF_DESCRIPTORS:
                log.warning("a connection could not be accepted: %s", error)
                return
            log.warning("out of file descriptors: no connection is accepted for a moment")
            self._table.make_room("no_descriptors")
            self._loop.remove_reader(listening)
            self._paused[listening] = self._loop.call_later(_PAUSE_S, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _accept_some(self, listening: socket.socket) -> bool:
        """Whether there may be more."""
        enough = self._table.dropped + _DROPPED_PER_TURN
        for _ in range(_PER_TURN):
            if self._table.dropped >= enough:  # their descriptors are free in the next turn
                break
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return False
            except ConnectionAbortedError:
                continue
            connection = self._table.admit(_counted_address(address))
            if connection is None:
                accepted.close()
                continue
            accepted.setblocking(False)
            task = self._loop.create_task(self._open(accepted, connection))
            connection.close = partial(_hang_up, accepted)
            self._opening.add(task)
            task.add_done_callback(partial(self._opened, accepted, connection))
        return True

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        """Make the connection's transport, and with TLS, shake hands."""
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: self._make_protocol(connection),
            accepted,
            ssl=self._context,
            ssl_handshake_timeout=_HANDSHAKE_S if self._context is not None else None,
        )
        if connection.over:  # dropped meanwhile
            transport.abort()

    def _opened(
        self, accepted: socket.socket, connection: Connection, task: asyncio.Task[None]
    ) -> None:
        """Clean up unless there is a transport. The task may have ended before its first step."""
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is None and not task.cancelled():
            return
        self._table.closed(connection)
        accepted.close()
        if isinstance(error, OSError | ssl.SSLError):
            log.debug("a connection could not be set up: %s", error)
        elif error is not None:
            log.error("a connection could not be set up", exc_info=error)


def _hang_up(accepted: socket.socket) -> None:
    """End a connection that is being set up; the task that does so then closes it."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)


def _counted_address(address: object) -> str:
    """The client's address; of IPv6, the network, as one client has all of its addresses."""
    host = str(address[0]) if isinstance(address, tuple) and address else ""
    if ":" not in host:
        return host
    with suppress(ValueError):
        number = ipaddress.IPv6Address(host.partition("%")[0])
        if (plain := number.ipv4_mapped) is not None:
            return str(plain)
        network = ipaddress.IPv6Network((number, _IPV6_PREFIX_BITS), strict=False)
        return str(network)
    return host


class Strangers:
    """What strangers do, in the log: a few lines at once, then a sum each minute.

    Counts events that anybody can cause as often as he likes. Used from one event loop.
    """

    def __init__(self) -> None:
        self._all: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
        self._by_address: Counter[str] = Counter()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, what: str, address: str) -> bool:
        """Count one event of the kind ``what``; whether it may have a line of its own.

        ``address``: whose it is, empty where it is unknown.
        """
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_WINDOW_S, self._tell)
        self._all[what] += 1
        if self._all[what] <= _LINES:
            return True
        self._left_out[what] += 1
        if address and (address in self._by_address or len(self._by_address) < _ADDRESSES):
            self._by_address[address] += 1
        return False

    def _tell(self) -> None:
        """Say what had no line of its own in the minute that ends."""
        if self._left_out:
            counts = ", ".join(f"{count} {what}" for what, count in self._left_out.most_common())
            most = self._by_address.most_common(1)
            of_one = f"; {most[0][1]} of all by {most[0][0]}" if most else ""
            log.warning("in the last minute, without a line each: %s%s", counts, of_one)
        self._all.clear()
        self._left_out.clear()
        self._by_address.clear()
        self._timer = None
