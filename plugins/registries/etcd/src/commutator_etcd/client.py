"""What the registry needs of etcd's API: every call has a deadline, members are tried in turn."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

# The supervisor starts other programs: gRPC need not prepare for forks, and would log that it does.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc
from aetcd import rpc
from attrs import frozen

from commutator.errors import ConfigError, RegistryError
from commutator_etcd.config import EtcdConfig, EtcdTls
from commutator_etcd.follower import Listing, WatchMessage

T = TypeVar("T")

_HAS_LEADER = (("hasleader", "true"),)
"""A member that lost its leader ends the stream; without this it would be silent for ever."""
_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", 64 << 20),
    # A connection that loses every packet is given up, instead of repeating them ever more rarely:
    # after minutes it would be found to work again only minutes later.
    ("grpc.keepalive_time_ms", 10_000),  # etcd refuses less than 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
)
_FINAL = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)
"""What another member would answer, too."""
_PAGE = 500
_PAUSE_S = 0.1


@frozen
class Stored:
    """A key's value, with what a transaction compares."""

    value: bytes
    mod_revision: int
    lease: int


def put(key: bytes, value: bytes, lease: int = 0) -> Any:
    """For ``EtcdClient.change``: store a value, attached to a lease unless that is 0."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> Any:
    """For ``EtcdClient.change``: delete a key."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def unchanged(key: bytes, stored: Stored | None) -> Any:
    """For ``EtcdClient.change``: the key is as it was read; None: it was not there."""
    revision = 0 if stored is None else stored.mod_revision
    return rpc.Compare(
        key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=revision
    )


def with_lease(key: bytes, lease: int) -> Any:
    """For ``EtcdClient.change``: the key is there, attached to the lease."""
    return rpc.Compare(key=key, target=rpc.Compare.LEASE, result=rpc.Compare.EQUAL, lease=lease)


class _Member:
    """One member's channel and stubs."""

    def __init__(self, url: str, credentials: Any) -> None:
        parts = urlsplit(url)
        self.url = url
        target = f"{parts.hostname}:{parts.port}"
        if ":" in (parts.hostname or ""):
            target = f"[{parts.hostname}]:{parts.port}"
        self.channel = (
            grpc.aio.insecure_channel(target, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        )
        self.kv = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)


class EtcdWatch:
    """An open watch of a range of keys."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def ask_progress(self) -> None:
        """Have the member say how far it is. Raises RegistryError."""
        request = rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
        await _answered(self._call.write(request))

    async def read(self) -> WatchMessage:
        """Wait for the next message. Raises RegistryError when the stream ends."""
        answer = await _received(self._call)
        events = {
            event.kv.key: None if event.type == rpc.Event.DELETE else event.kv.value
            for event in answer.events
        }
        return WatchMessage(
            revision=answer.header.revision,
            delta=events,
            progress=answer.watch_id == -1,
            cancelled=(answer.cancel_reason or "cancelled") if answer.canceled else None,
            compacted=answer.compact_revision > 0,
        )


class EtcdClient:
    """Asks one member until it fails, then the next one. Used from one event loop."""

    def __init__(self, config: EtcdConfig) -> None:
        """Raises ConfigError when a certificate cannot be read."""
        credentials = None if config.tls is None else _credentials(config.tls)
        self._members = [_Member(url, credentials) for url in config.endpoints]
        self._at = random.randrange(len(self._members))  # noqa: S311 - not all at the same one
        self._timeout_s = config.call_timeout_s

    async def get(self, key: bytes) -> Stored | None:
        """The latest value of a key."""
        request = rpc.RangeRequest(key=key)
        answer = await self._ask(lambda member: member.kv.Range, request)
        for pair in answer.kvs:
            return Stored(pair.value, pair.mod_revision, pair.lease)
        return None

    async def list(self, prefix: bytes) -> Listing:
        """All keys that begin with ``prefix``, as of one revision not older than this call."""
        values: dict[bytes, bytes] = {}
        begin, end, revision = prefix, prefix[:-1] + bytes([prefix[-1] + 1]), 0
        while True:
            request = rpc.RangeRequest(key=begin, range_end=end, limit=_PAGE, revision=revision)
            answer = await self._ask(lambda member: member.kv.Range, request)
            values |= {pair.key: pair.value for pair in answer.kvs}
            revision = revision or answer.header.revision
            if not answer.more:
                return Listing(revision, values)
            begin = answer.kvs[-1].key + b"\0"

    async def change(self, compare: Sequence[Any], operations: Iterable[Any]) -> int:
        """Carry out all operations if every comparison holds; 0: one did not.

        Otherwise returns the revision of the change, which is above 0.
        """
        request = rpc.TxnRequest(compare=compare, success=operations)
        answer = await self._ask(lambda member: member.kv.Txn, request)
        return int(answer.header.revision) if answer.succeeded else 0

    async def grant(self, ttl_s: int) -> int:
        """A new lease."""
        request = rpc.LeaseGrantRequest(TTL=ttl_s)
        return int((await self._ask(lambda member: member.leases.LeaseGrant, request)).ID)

    async def revoke(self, lease: int) -> None:
        """End a lease, and delete the keys attached to it. Does nothing when it is over."""
        request = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self._ask(lambda member: member.leases.LeaseRevoke, request)
        except RegistryError as error:
            cause = error.__cause__
            if not (
                isinstance(cause, grpc.aio.AioRpcError)
                and cause.code() == grpc.StatusCode.NOT_FOUND
            ):
                raise

    async def renew(self, lease: int, timeout_s: float) -> bool:
        """Ask one member, once. False: the lease lapsed. Raises RegistryError."""
        member = self._members[self._at]
        call = member.leases.LeaseKeepAlive(timeout=timeout_s, metadata=_HAS_LEADER)
        try:
            await _answered(call.write(rpc.LeaseKeepAliveRequest(ID=lease)))
            answer = await _received(call)
        except RegistryError as error:
            self.leave(member)
            raise RegistryError(f"etcd at {member.url}: {error}") from error
        finally:
            call.cancel()
        return bool(answer.TTL > 0)

    @asynccontextmanager
    async def watch(self, prefix: bytes, revision: int) -> AsyncIterator[EtcdWatch]:
        """Watch all keys that begin with ``prefix``, from ``revision`` on."""
        member = self._members[self._at]
        create = rpc.WatchCreateRequest(
            key=prefix, range_end=prefix[:-1] + bytes([prefix[-1] + 1]), start_revision=revision
        )
        call = member.watches.Watch(metadata=_HAS_LEADER)
        try:
            async with asyncio.timeout(self._timeout_s):
                await _answered(call.write(rpc.WatchRequest(create_request=create)))
            yield EtcdWatch(call)
        except TimeoutError as error:
            self.leave(member)
            raise RegistryError(f"etcd at {member.url}: no answer") from error
        except RegistryError as error:
            self.leave(member)
            raise RegistryError(f"etcd at {member.url}: {error}") from error
        finally:
            call.cancel()

    def turn_away(self) -> None:
        """Ask the next member from now on."""
        self.leave(self._members[self._at])

    def leave(self, member: _Member) -> None:
        """Ask the next member from now on, unless another call has moved on already."""
        if self._members[self._at] is member:
            self._at = (self._at + 1) % len(self._members)

    async def close(self) -> None:
        for member in self._members:
            await member.channel.close()

    async def _ask(self, method: Callable[[_Member], Any], request: Any) -> Any:
        """The first answer of a member, each asked once; a single one is asked twice."""
        for attempt in range(max(2, len(self._members))):
            member = self._members[self._at]
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            try:
                return await method(member)(request, timeout=self._timeout_s)
            except grpc.aio.AioRpcError as error:
                problem = f"etcd at {member.url}: {error.details() or error.code().name}"
                cause = error
                if error.code() in _FINAL:
                    break
                self.leave(member)
        raise RegistryError(problem) from cause


async def _answered(operation: Awaitable[T]) -> T:
    """The result of a step of a stream. Raises RegistryError."""
    try:
        return await operation
    except grpc.aio.AioRpcError as error:
        raise RegistryError(error.details() or error.code().name) from error
    except asyncio.InvalidStateError as error:  # the call is over
        raise RegistryError("the stream ended") from error


async def _received(call: Any) -> Any:
    """The stream's next message. Raises RegistryError."""
    message = await _answered(call.read())
    if message is grpc.aio.EOF:
        raise RegistryError(await call.details() or "the stream ended")
    return message


def _credentials(tls: EtcdTls) -> Any:
    def read(name: str, path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            return Path(path).expanduser().read_bytes()
        except OSError as error:
            problem = f"registry.tls.{name}: {path}: {error.strerror or error}"
            raise ConfigError([problem]) from error

    return grpc.ssl_channel_credentials(
        read("ca_file", tls.ca_file),
        read("key_file", tls.key_file),
        read("cert_file", tls.cert_file),
    )
