"""Makes the faults of a plan happen to the cluster of `scripts/cluster_demo.py`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from types import MappingProxyType

from tests.support.bad_links import bad_link
from tests.support.chaos_plan import Fault, Kind
from tests.support.clocks import Clocks
from tests.support.cluster_views import Demo, engines_of, etcdctl, leader_of_etcd
from tests.support.hosts import Host
from tests.support.processes import command_of

__all__ = ["Faults", "cut_off"]

_LOSS = 0.05
_DELAY_S = 0.04


@contextmanager
def cut_off(host: Host, *others: Host) -> Iterator[None]:
    """Lose every packet between a host and others, in the block."""
    host.cut_off(*others)
    try:
        yield
    finally:
        host.cut_off(*others, cut=False)


class Faults:
    """What a fault does to each of its places."""

    def __init__(self, demo: Demo, clocks: Clocks) -> None:
        """``clocks``: those that the hosts of the cluster run with."""
        self._demo = demo
        self._clocks = clocks
        self._hosts = {host.name: host for host in (*demo.hosts, *demo.others)}

    def befall(self, fault: Fault) -> AbstractContextManager[None]:
        """The fault lasts as long as the block. Raises LookupError if etcd has no leader."""
        return self.how[fault.kind](self, fault)

    def _place(self, fault: Fault) -> Host:
        return self._hosts[fault.place]

    @contextmanager
    def _worker_killed(self, fault: Fault) -> Iterator[None]:
        _kill(max(engines_of(self._place(fault))))  # the youngest, so that another one grows old
        yield

    @contextmanager
    def _door_killed(self, fault: Fault) -> Iterator[None]:
        pids = self._place(fault).pids()
        _kill(*(pid for pid in pids if "commutator.frontend.process" in command_of(pid)))
        yield

    @contextmanager
    def _host_killed(self, fault: Fault) -> Iterator[None]:
        host = self._place(fault)
        if fault.kind is Kind.HOST_VANISHED:
            host.set_link(False)
        self._demo.end(host, signal.SIGKILL)
        yield
        host.set_link(True)
        self._demo.begin_commutator(host)

    @contextmanager
    def _paused(self, fault: Fault) -> Iterator[None]:
        host = self._place(fault)
        host.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            host.signal(signal.SIGCONT)

    def _cut_from_etcd(self, fault: Fault) -> AbstractContextManager[None]:
        return cut_off(self._place(fault), *self._demo.etcd_hosts)

    @contextmanager
    def _compacted_unseen(self, fault: Fault) -> Iterator[None]:
        with self._cut_from_etcd(fault):
            yield
            etcdctl(self._demo, "put", "/chaos", "changed")  # which no watch there has told
            found = etcdctl(self._demo, "get", "/chaos", "-w", "fields")
            revision = re.search(r'"Revision" : (\d+)', found)
            assert revision is not None, found
            etcdctl(self._demo, "compact", revision.group(1))

    def _cut_from_door(self, fault: Fault) -> AbstractContextManager[None]:
        return cut_off(self._place(fault), self._hosts[fault.other])

    @contextmanager
    def _cut_from_all(self, fault: Fault) -> Iterator[None]:
        host = self._place(fault)
        host.set_link(False)
        try:
            yield
        finally:
            host.set_link(True)

    @contextmanager
    def _bad_link(self, fault: Fault) -> Iterator[None]:
        with bad_link(self._place(fault), loss=_LOSS, delay_s=_DELAY_S):
            yield

    @contextmanager
    def _clock_jumped(self, fault: Fault) -> Iterator[None]:
        self._clocks.jump(fault.place, fault.offset_s)
        yield

    @contextmanager
    def _members_killed(self, fault: Fault) -> Iterator[None]:
        names = [name for name in (fault.place, fault.other) if name]
        members = [self._hosts[name] for name in names] or [leader_of_etcd(self._demo)]
        for member in members:
            self._demo.end(member, signal.SIGKILL)
        yield
        for member in members:
            self._demo.begin_etcd(member)

    @contextmanager
    def _nats_killed(self, fault: Fault) -> Iterator[None]:
        self._demo.end(self._place(fault), signal.SIGKILL)
        yield
        self._demo.begin_nats(self._place(fault))

    def _nats_cut_off(self, fault: Fault) -> AbstractContextManager[None]:
        return cut_off(self._place(fault), *self._demo.hosts)

    how: Mapping[Kind, Callable[[Faults, Fault], AbstractContextManager[None]]] = MappingProxyType(
        {
            Kind.WORKER_KILLED: _worker_killed,
            Kind.DOOR_KILLED: _door_killed,
            Kind.HOST_VANISHED: _host_killed,
            Kind.HOST_KILLED: _host_killed,
            Kind.HOST_PAUSED_BRIEFLY: _paused,
            Kind.HOST_PAUSED: _paused,
            Kind.CUT_FROM_ETCD: _cut_from_etcd,
            Kind.COMPACTED_UNSEEN: _compacted_unseen,
            Kind.CUT_FROM_DOOR: _cut_from_door,
            Kind.CUT_FROM_ALL: _cut_from_all,
            Kind.BAD_LINK: _bad_link,
            Kind.CLOCK_JUMPED: _clock_jumped,
            Kind.ETCD_MEMBER_KILLED: _members_killed,
            Kind.ETCD_MEMBER_PAUSED: _paused,
            Kind.ETCD_LEADER_KILLED: _members_killed,
            Kind.ETCD_WITHOUT_QUORUM: _members_killed,
            Kind.ETCD_BAD_LINK: _bad_link,
            Kind.NATS_KILLED: _nats_killed,
            Kind.NATS_PAUSED: _paused,
            Kind.NATS_CUT_OFF: _nats_cut_off,
        }
    )


def _kill(*pids: int) -> None:
    """End processes as the kernel does when memory is out."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
