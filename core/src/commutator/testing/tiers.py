"""The conformance suite for storage tiers: subclass, give a factory, run pytest.

Bytes are really moved, by NIXL.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from commutator.errors import TierError
from commutator.kv.keys import KEY_BYTES, BlockKey
from commutator.kv.medium import tier_of
from commutator.kv.tier import StorageTier, Stored
from commutator.testing.tier_machine import TierLives, TierMachine
from commutator.testing.tier_user import TierAgents, TierUser, slot_geometry
from commutator.transfer import Memory

__all__ = ["TierContract", "TierUser"]


class TierContract:
    """What every storage tier must hold to. ``make_tier`` returns a fresh, unopened tier."""

    durable = False
    """Whether committed blocks survive the process."""
    named = False
    """Whether bytes lie under the block's name rather than in a slot, as in an object store: they
    are there once they are written, and a crash before ``commit`` loses nothing."""
    block_bytes = 8192
    block_tokens = 4
    max_examples = 20
    """How many lives the stateful test draws, each of up to ``steps`` steps."""
    steps = 25

    def make_tier(self, folder: Path) -> StorageTier:
        """A tier with room for 4 to 64 blocks of ``block_bytes`` bytes.

        A durable one keeps them in ``folder``, or under its name: a tier that is made later with
        the same folder finds them, one with another folder does not.
        """
        raise NotImplementedError("return a fresh instance of the tier under test")

    def use(self, folder: Path, identity: str = "00" * 32) -> TierUser:
        """Open a tier in ``folder``, ready to put and get blocks."""
        tier = self.make_tier(folder)
        geometry = slot_geometry(tier, self.block_bytes, self.block_tokens, identity)
        return TierUser(tier, geometry, self._agents)

    @cached_property
    def _agents(self) -> TierAgents:
        return TierAgents()

    @pytest.fixture(autouse=True)
    def _closing_agents(self) -> Iterator[None]:
        yield
        self._agents.close()

    def _key(self, number: int) -> BlockKey:
        return number.to_bytes(KEY_BYTES, "big")

    def test_says_what_it_is(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            tier = user.tier
            assert tier_of(tier.medium) is not None, "a medium that routers know; see kv.medium"
            assert tier.memory in Memory
            assert tier.backend
            parameters = tier.backend_parameters
            assert all(isinstance(text, str) for text in (*parameters, *parameters.values()))
            assert tier.statistics().capacity >= 4

    def test_lives_by_the_rules(self) -> None:
        """Random lives against a dictionary; see ``TierMachine``."""
        contract = self

        class Lives(TierLives):
            durable = contract.durable
            named = contract.named
            block_bytes = contract.block_bytes

            def open(self, folder: Path) -> TierUser:
                return contract.use(folder)

        class Machine(TierMachine):
            def __init__(self) -> None:
                super().__init__(Lives())

        gc.freeze()  # so that the collections after a crash look only at what the test made
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    max_examples=self.max_examples,
                    stateful_step_count=self.steps,
                    deadline=None,
                    suppress_health_check=list(HealthCheck),
                ),
            )
        finally:
            gc.unfreeze()

    def test_gives_no_more_slots_than_it_has(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            capacity = user.tier.statistics().capacity
            assert capacity <= 64, "for this suite, make a tier with fewer slots"
            keys = [self._key(number) for number in range(capacity + 3)]
            slots = user.tier.reserve(keys)
            given = [slot for slot in slots if slot is not None]
            assert len(given) == len(set(given)) == capacity
            assert user.tier.reserve([b"\xff" * KEY_BYTES]) == [None]
            user.tier.release(given[:1])
            assert user.tier.reserve([b"\xff" * KEY_BYTES]) != [None]

    def test_a_key_named_twice_gets_one_slot(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            first, second = user.tier.reserve([self._key(1), self._key(1)])
            assert first is not None
            assert second is None
            assert user.tier.reserve([self._key(1)]) == [None]

    def test_slots_do_not_overlap(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            size = user.geometry.slot_bytes // user.tier.alignment_bytes * user.tier.alignment_bytes
            slots = user.tier.reserve([self._key(number) for number in range(4)])
            assert None not in slots
            spans = [user.tier.place(slot, size)[0] for slot in slots if slot is not None]
            ranges = sorted((span.device, span.address, span.size_bytes) for span in spans)
            for (device, address, size_bytes), after in pairwise(ranges):
                assert size_bytes == size
                assert device != after[0] or address + size_bytes <= after[1]

    def test_bytes_of_a_full_tier_come_back(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            blocks = {
                self._key(number): bytes([number + 1]) * self.block_bytes
                for number in range(user.tier.statistics().capacity)
            }
            assert all(user.put(key, block) for key, block in blocks.items())
            assert not user.put(b"\xff" * KEY_BYTES, b"one too many")
            assert {key: user.get(key) for key in blocks} == blocks

    def test_an_evicted_slot_is_free_when_its_last_reader_is_done(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            tier, capacity = user.tier, user.tier.statistics().capacity
            keys = [self._key(number) for number in range(capacity)]
            assert all(user.put(key, b"old") for key in keys)
            (stored,) = tier.lookup(keys[:1])
            assert stored is not None
            tier.pin(stored.slot)
            tier.pin(stored.slot)
            tier.evict(keys[:1])
            assert not user.put(keys[0], b"new"), "its only free slot is still being read"
            tier.unpin(stored.slot)
            assert user.read(stored) == b"old"
            tier.unpin(stored.slot)
            assert user.put(keys[0], b"new")
            assert user.get(keys[0]) == b"new"

    def test_making_room_takes_nothing_from_others(self, tmp_path: Path) -> None:
        key, block = self._key(1), b"stored by one, used by two"
        with self.use(tmp_path) as user:
            assert user.put(key, block)
            if user.tier.shared:
                with self.use(tmp_path) as other:
                    assert other.get(key) == block
                    other.tier.make_room([key])
                    assert other.tier.lookup([key]) == [None]
                assert user.get(key) == block
            user.tier.make_room([key])
            assert user.find(key) == [None]
            assert user.put(key, block), "there is room for it again"

    def test_what_is_released_while_pinned_is_not_given_away(self, tmp_path: Path) -> None:
        """NIXL may still write to a slot whose store was given up."""
        with self.use(tmp_path) as user:
            tier, capacity = user.tier, user.tier.statistics().capacity
            slots = tier.reserve([self._key(number) for number in range(capacity)])
            assert slots[0] is not None
            tier.pin(slots[0])
            tier.release([slots[0]])
            assert tier.reserve([b"\xff" * KEY_BYTES]) == [None]
            tier.unpin(slots[0])
            assert tier.reserve([b"\xff" * KEY_BYTES]) == [slots[0]]

    def test_misuse_is_refused(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            tier = user.tier
            (slot,) = tier.reserve([self._key(1)])
            assert slot is not None
            with pytest.raises(ValueError, match="slot"):
                tier.commit([Stored(key=self._key(2), slot=slot, size_bytes=1, checksum=0)])
            with pytest.raises(ValueError, match="slot"):
                tier.unpin(slot)
            tier.release([slot])
            for call in (tier.pin, lambda slot: tier.release([slot])):
                with pytest.raises(ValueError, match="slot"):
                    call(slot)
            tier.evict([self._key(3)])
            assert tier.lookup([self._key(1), self._key(2), self._key(3)]) == [None] * 3

    def test_can_be_closed_twice_and_opened_again(self, tmp_path: Path) -> None:
        user = self.use(tmp_path)
        tier = user.tier
        user.close()
        tier.close()
        with TierUser(tier, user.geometry) as again:
            assert again.put(self._key(1), b"block")
            assert again.get(self._key(1)) == b"block"

    def test_only_a_durable_tier_remembers(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            assert user.put(self._key(1), b"first", parent=None)
            assert user.put(self._key(2), b"second", parent=self._key(1))
            before = user.find(self._key(1), self._key(2))
        with self.use(tmp_path) as user:
            if not self.durable:
                assert user.recovered == []
                return
            assert [user.get(self._key(n)) for n in (1, 2)] == [b"first", b"second"]
            for old, new in zip(before, user.find(self._key(1), self._key(2)), strict=True):
                assert old is not None
                assert new is not None
                assert (new.key, new.size_bytes) == (old.key, old.size_bytes)
                assert new.parent in {None, old.parent}
                assert new.token_ids in {(), old.token_ids}

    def test_blocks_of_another_identity_are_not_ours(self, tmp_path: Path) -> None:
        with self.use(tmp_path) as user:
            assert user.put(self._key(1), b"theirs")
        try:
            other = self.use(tmp_path, identity="11" * 32)
        except TierError:
            return  # refused: as good
        with other:
            assert other.recovered == []
            assert other.get(self._key(1)) is None
