"""Every eviction policy that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator.contract.eviction import EvictionPolicy
from commutator_eviction.arc import Arc
from commutator_eviction.leaf_first import LeafFirst
from commutator_eviction.lru import Lru
from commutator_eviction.s3fifo import S3Fifo
from commutator_eviction.tinylfu import TinyLfu
from commutator_testing.eviction import EvictionContract


class TestLru(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return Lru()


class TestTinyLfu(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return TinyLfu(capacity_blocks)


class TestS3Fifo(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return S3Fifo(capacity_blocks)


class TestArc(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return Arc(capacity_blocks)


class TestLeafFirst(EvictionContract):
    def make_policy(self, capacity_blocks: int) -> EvictionPolicy:
        return LeafFirst()
