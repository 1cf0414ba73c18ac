"""Every eviction policy that comes with the project passes the shipped suite."""

from __future__ import annotations

from commutator import EvictionPolicy
from commutator.testing import EvictionContract
from commutator_eviction import Arc, LeafFirst, Lru, S3Fifo, TinyLfu


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
