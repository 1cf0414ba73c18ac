"""Three members of etcd, and the network to each host, on the clock of a virtual event loop.

``EtcdClient`` talks to ``SimulatedMember`` instead of gRPC's stubs, so everything above the wire is
the real code. Simulated are: trips that take time, cut links (what is sent waits, as in TCP),
members that are paused or killed, elections, a lost quorum, leases, compaction, watches.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import grpc
from aetcd import rpc
from attrs import define, field

__all__ = ["ELECTION_S", "MEMBERS", "MemberState", "SimulatedEtcd", "endpoints"]

MEMBERS = 3
ELECTION_S = 1.2
_NO_LEADER_S = 4.6
"""After this long without a leader, a member ends the watches that ask for one."""
_FASTEST_TRIP_S = 0.002


class MemberState(Enum):
    """What a member does."""

    UP = auto()
    PAUSED = auto()
    KILLED = auto()


def endpoints(host: int) -> tuple[str, ...]:
    """The URLs at which a host reaches the members; no two hosts have the same."""
    return tuple(f"http://127.0.0.1:{1000 * (host + 1) + member}" for member in range(MEMBERS))


def _error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@define
class _Lease:
    ttl_s: float
    expires_s: float
    keys: set[bytes] = field(factory=set)


@define
class _Value:
    value: bytes
    mod_revision: int
    lease: int


class SimulatedEtcd:
    """The members' common data. Call it in the loop that uses it."""

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        """``on_change`` is called when members, links or the time of trips have changed."""
        self.loop = asyncio.get_running_loop()
        self._on_change = on_change
        self.values: dict[bytes, _Value] = {}
        self.revision = 1
        self.compacted = 0
        self.leases: dict[int, _Lease] = {}
        self.members = [MemberState.UP] * MEMBERS
        self.leader: int | None = 0
        self.has_quorum = True
        self.cut: set[tuple[int, int]] = set()
        """Links, by host and member, over which nothing gets through."""
        self.trip_s: dict[int, float] = {}
        """How long a message of a host takes each way."""
        self.lapsed: list[tuple[float, bytes]] = []
        """When leases lapsed, and their keys."""
        self._history: list[tuple[int, dict[bytes, bytes | None]]] = []
        self._last_lease = 0
        self._watches: list[_WatchCall] = []
        self._waiting: list[tuple[Any, ...]] = []
        """What ``once`` does later."""

    def member(self, url: str, credentials: object) -> SimulatedMember:
        """Stands for the client's connection to a member."""
        port = urlsplit(url).port
        assert port is not None
        return SimulatedMember(self, url, port // 1000 - 1, port % 1000)

    # ------------------------------------------------------------ faults

    def set_cut(self, host: int, members: frozenset[int]) -> None:
        """Cut a host off from these members, and from no others."""
        self.cut = {link for link in self.cut if link[0] != host}
        self.cut |= {(host, member) for member in members}
        self._tell()

    def set_trip(self, host: int, seconds: float | None) -> None:
        """How long messages of a host take each way from now on; None: as at first."""
        self.trip_s[host] = _FASTEST_TRIP_S if seconds is None else seconds
        self._on_change()

    def set_member(self, member: int, state: MemberState) -> None:
        """Pause, kill or bring back a member."""
        self.members[member] = state
        self.has_quorum = 2 * self.members.count(MemberState.UP) > MEMBERS
        if state is MemberState.KILLED:
            self._break(member)
        if self.leader is not None and not (
            self.members[self.leader] is MemberState.UP and self.has_quorum
        ):
            self.leader = None  # one that has lost its quorum steps down
            self.loop.call_later(_NO_LEADER_S, self._end_watches_without_leader)
        if self.leader is None and self.has_quorum:
            self.loop.call_later(ELECTION_S, self._elect)
        self._tell()

    @property
    def works(self) -> bool:
        """Whether there is a leader that can decide."""
        return self.leader is not None

    def answers(self, host: int) -> bool:
        """Whether a host reaches a member that can decide."""
        up = [m for m, state in enumerate(self.members) if state is MemberState.UP]
        return self.works and any((host, member) not in self.cut for member in up)

    def compact(self) -> None:
        """Forget how the present values came about."""
        self.compacted = self.revision
        self._history.clear()

    def end_leases(self) -> None:
        """What a leader did that was stopped and woke up: it ends leases that were renewed."""
        for lease in list(self.leases):
            self._end(lease)

    def _elect(self) -> None:
        if self.leader is None and self.has_quorum:
            self.leader = self.members.index(MemberState.UP)
            for number, lease in self.leases.items():
                lease.expires_s = self.loop.time() + lease.ttl_s
                self._expect_end(number)
            self._tell()

    def _end_watches_without_leader(self) -> None:
        if self.leader is None:
            for member in range(MEMBERS):
                if self.members[member] is MemberState.UP:
                    self._break(member)

    def _break(self, member: int) -> None:
        for watch in [one for one in self._watches if one.member.number == member]:
            watch.end("no leader")

    def _tell(self) -> None:
        self._on_change()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self.loop.call_soon(self.once, *one)

    def once(self, true: Callable[[], bool], act: Callable[..., object], *args: Any) -> None:
        """Act when it is true: now, or after a change of members and links."""
        if true():
            act(*args)
        else:
            self._waiting.append((true, act, *args))

    # ------------------------------------------------------------ data

    def range(self, request: Any) -> Any:
        end = request.range_end or request.key + b"\0"
        found = [
            SimpleNamespace(
                key=key, value=one.value, mod_revision=one.mod_revision, lease=one.lease
            )
            for key, one in sorted(self.values.items())
            if request.key <= key < end
        ]
        return self._answer(kvs=found, more=False)

    def transact(self, request: Any) -> Any:
        succeeded = all(self._holds(compare) for compare in request.compare)
        if succeeded:
            delta: dict[bytes, bytes | None] = {}
            for operation in request.success:
                if operation.WhichOneof("request") == "request_put":
                    put = operation.request_put
                    if put.lease and put.lease not in self.leases:
                        raise _error(grpc.StatusCode.NOT_FOUND, "requested lease not found")
                    delta[put.key] = put.value
                    self._detach(put.key)
                    self.values[put.key] = _Value(put.value, self.revision + 1, put.lease)
                    if put.lease:
                        self.leases[put.lease].keys.add(put.key)
                elif (key := operation.request_delete_range.key) in self.values:
                    delta[key] = None
                    self._detach(key)
                    del self.values[key]
            self._commit(delta)
        return self._answer(succeeded=succeeded)

    def grant(self, request: Any) -> Any:
        self._last_lease += 1
        ttl_s = float(request.TTL)
        self.leases[self._last_lease] = _Lease(ttl_s, self.loop.time() + ttl_s)
        self._expect_end(self._last_lease)
        return self._answer(ID=self._last_lease)

    def revoke(self, request: Any) -> Any:
        if request.ID not in self.leases:
            raise _error(grpc.StatusCode.NOT_FOUND, "requested lease not found")
        self._end(request.ID)
        return self._answer()

    def renew(self, request: Any) -> Any:
        lease = self.leases.get(request.ID)
        if lease is None:
            return self._answer(TTL=0)
        lease.expires_s = self.loop.time() + lease.ttl_s
        return self._answer(TTL=lease.ttl_s)

    def _answer(self, **fields: Any) -> Any:
        return SimpleNamespace(header=SimpleNamespace(revision=self.revision), **fields)

    def _holds(self, compare: Any) -> bool:
        stored = self.values.get(compare.key)
        if compare.target == rpc.Compare.LEASE:
            return stored is not None and bool(stored.lease == compare.lease)
        return bool((0 if stored is None else stored.mod_revision) == compare.mod_revision)

    def _detach(self, key: bytes) -> None:
        stored = self.values.get(key)
        if stored is not None and stored.lease in self.leases:
            self.leases[stored.lease].keys.discard(key)

    def _commit(self, delta: dict[bytes, bytes | None]) -> None:
        if delta:
            self.revision += 1
            self._history.append((self.revision, delta))
            for watch in self._watches:
                watch.send_changes([(self.revision, delta)])

    def _expect_end(self, number: int) -> None:
        self.loop.call_at(self.leases[number].expires_s, self._end_if_due, number)

    def _end_if_due(self, number: int) -> None:
        lease = self.leases.get(number)
        if lease is None or not self.works:  # a new leader starts every lease anew
            return
        if lease.expires_s > self.loop.time():
            self._expect_end(number)
            return
        self.lapsed += [(self.loop.time(), key) for key in lease.keys]
        self._end(number)

    def _end(self, number: int) -> None:
        delta: dict[bytes, bytes | None] = dict.fromkeys(self.leases.pop(number).keys)
        for key in delta:
            del self.values[key]
        self._commit(delta)

    def history_from(self, revision: int) -> Iterator[tuple[int, dict[bytes, bytes | None]]]:
        return (change for change in self._history if change[0] >= revision)

    def watched(self, watch: _WatchCall) -> None:
        self._watches.append(watch)

    def unwatched(self, watch: _WatchCall) -> None:
        if watch in self._watches:
            self._watches.remove(watch)


class SimulatedMember:
    """One host's connection to one member, with the stubs that the client uses."""

    def __init__(self, etcd: SimulatedEtcd, url: str, host: int, number: int) -> None:
        self.etcd = etcd
        self.url = url
        self.host = host
        self.number = number
        self.kv = SimpleNamespace(Range=self._does(etcd.range), Txn=self._does(etcd.transact))
        self.leases = SimpleNamespace(
            LeaseGrant=self._does(etcd.grant),
            LeaseRevoke=self._does(etcd.revoke),
            LeaseKeepAlive=lambda timeout, metadata: _RenewCall(self, timeout),
        )
        self.watches = SimpleNamespace(Watch=lambda metadata: _WatchCall(self))
        self.channel = SimpleNamespace(close=_nothing)
        self._link = (host, number)

    def _does(self, do: Callable[[Any], Any]) -> Callable[..., Awaitable[Any]]:
        def call(request: Any, timeout: float) -> Awaitable[Any]:
            return self.ask(do, request, timeout)

        return call

    @property
    def state(self) -> MemberState:
        return self.etcd.members[self.number]

    def is_running(self) -> bool:
        """Whether what has arrived, and what it sends, moves on."""
        return self.state is not MemberState.PAUSED

    def answers(self) -> bool:
        """Whether a question moves on: it is decided, or fails as the member was killed."""
        state = self.state
        return self.etcd.works if state is MemberState.UP else state is MemberState.KILLED

    def trip(self, arrive: Callable[..., object], *args: Any) -> None:
        """One way to the member, or back; what is sent on a cut link waits."""
        etcd = self.etcd
        if self._link in etcd.cut:
            etcd.once(self._is_linked, self.trip, arrive, *args)
        else:
            etcd.loop.call_later(etcd.trip_s.get(self.host, _FASTEST_TRIP_S), arrive, *args)

    def _is_linked(self) -> bool:
        return self._link not in self.etcd.cut

    def ask(self, do: Callable[[Any], Any], request: Any, timeout_s: float) -> Awaitable[Any]:
        """What is asked is done even if the answer is too late, once the member has it."""
        return _Call(self, do, request, timeout_s).answer


class _Call:
    """A question on its way to a member and back."""

    __slots__ = ("_deadline", "_do", "_member", "_request", "answer")

    def __init__(
        self, member: SimulatedMember, do: Callable[[Any], Any], request: Any, timeout_s: float
    ) -> None:
        self._member = member
        self._do = do
        self._request = request
        loop = member.etcd.loop
        self.answer: asyncio.Future[Any] = loop.create_future()
        self._deadline = loop.call_later(
            timeout_s, self._fail, grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
        )
        member.trip(self._arrived)

    def _arrived(self) -> None:
        if self._member.state is MemberState.KILLED:
            self._fail(grpc.StatusCode.UNAVAILABLE, "connection refused")
        elif not self.answer.done():
            self._member.etcd.once(self._member.answers, self._serve)

    def _serve(self) -> None:
        if self._member.state is MemberState.KILLED:
            self._fail(grpc.StatusCode.UNAVAILABLE, "connection reset")
            return
        try:
            result = self._do(self._request)
        except grpc.aio.AioRpcError as error:
            result = error
        self._member.trip(self._end, result)

    def _fail(self, code: grpc.StatusCode, details: str) -> None:
        self._end(_error(code, details))

    def _end(self, result: Any) -> None:
        self._deadline.cancel()
        if self.answer.done():
            return
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


async def _nothing() -> None:
    pass


class _RenewCall:
    """A stream for one renewal."""

    def __init__(self, member: SimulatedMember, timeout_s: float) -> None:
        self._member = member
        self._timeout_s = timeout_s
        self._request: Any = None

    async def write(self, request: Any) -> None:
        self._request = request

    def read(self) -> Awaitable[Any]:
        return self._member.ask(self._member.etcd.renew, self._request, self._timeout_s)

    def cancel(self) -> None:
        pass


class _InTurn:
    """Begins with an item once ``done`` was called for the one before."""

    def __init__(self, begin: Callable[[Any], object]) -> None:
        self._begin = begin
        self._waiting: deque[Any] = deque()
        self._busy = False

    def put(self, item: Any) -> None:
        if self._busy:
            self._waiting.append(item)
        else:
            self._busy = True
            self._begin(item)

    def done(self) -> None:
        self._busy = bool(self._waiting)
        if self._busy:
            self._begin(self._waiting.popleft())


class _WatchCall:
    """A watch's stream: what the member sends arrives in order, each message after a trip."""

    def __init__(self, member: SimulatedMember) -> None:
        self.member = member
        self._etcd = member.etcd
        self._requests = _InTurn(lambda request: member.trip(self._request_arrived, request))
        self._sent = _InTurn(self._depart)
        self._arrived: asyncio.Queue[Any] = asyncio.Queue()
        self._ended: str | None = None
        self._cancelled = False

    async def write(self, request: Any) -> None:
        if self._ended is not None:
            raise asyncio.InvalidStateError
        self._requests.put(request)

    async def read(self) -> Any:
        message = await self._arrived.get()
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self) -> None:
        self._cancelled = True
        self._etcd.unwatched(self)

    def end(self, reason: str) -> None:
        """The member ends the stream."""
        self._ended = reason
        self._etcd.unwatched(self)
        self._sent.put(_error(grpc.StatusCode.UNAVAILABLE, reason))

    def send_changes(self, changes: Any) -> None:
        """In whole revisions, also while the member is paused: it catches up afterwards."""
        for revision, delta in changes:
            events = [
                SimpleNamespace(
                    type=rpc.Event.DELETE if value is None else rpc.Event.PUT,
                    kv=SimpleNamespace(key=key, value=value),
                )
                for key, value in delta.items()
            ]
            self._send(revision, events=events)

    def _send(self, revision: int, **fields: Any) -> None:
        message = {
            "events": [], "watch_id": 0, "canceled": False, "cancel_reason": "",
            "compact_revision": 0, **fields,
        }  # fmt: skip
        header = SimpleNamespace(revision=revision)
        self._sent.put(SimpleNamespace(header=header, **message))

    def _request_arrived(self, request: Any) -> None:
        if self._cancelled:
            return
        if self.member.state is MemberState.KILLED:
            self.end("connection refused")
        else:
            self._etcd.once(self.member.is_running, self._take, request)

    def _take(self, request: Any) -> None:
        if self._cancelled:
            return
        etcd = self._etcd
        if request.WhichOneof("request_union") == "progress_request":
            self._send(etcd.revision, watch_id=-1)
        else:
            start = request.create_request.start_revision
            self._send(etcd.revision)
            if start <= etcd.compacted:
                compacted = etcd.compacted
                self._send(etcd.revision, canceled=True, compact_revision=compacted)
            else:
                self.send_changes(etcd.history_from(start))
                etcd.watched(self)
        self._requests.done()

    def _depart(self, message: Any) -> None:
        self._etcd.once(self.member.is_running, self.member.trip, self._message_arrived, message)

    def _message_arrived(self, message: Any) -> None:
        if not self._cancelled:
            self._arrived.put_nowait(message)
            self._sent.done()
