"""The conformance suite for storage tiers: subclass it, define a factory, run pytest.

NIXL moves real bytes.
"""

from __future__ import annotations

import gc
import random
import tempfile
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import pytest
from attrs import define
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from commutator import KEY_BYTES, BlockKey, Memory, Slot, StorageTier, StoredBlock
from commutator.contract.block import cache_level
from commutator.errors import TierError
from commutator_testing.profile import THOROUGH, examples
from commutator_testing.tier_user import TierAgents, TierUser, slot_geometry

_KEYS = [bytes([number]) * KEY_BYTES for number in range(1, 8)]
_keys = st.sampled_from(_KEYS)


class TierContract:
    """What every storage tier must do. ``make_tier`` returns a fresh, unopened tier."""

    documented_in = "StorageTier in docs/reference/contract/tier.md and docs/how-to/write-a-tier.md"

    durable = False
    """Whether committed blocks survive the process."""
    named = False
    """Whether bytes are stored under the block's name rather than in a slot, as in an object store:
    they can be read once they are written, and a crash before ``commit`` loses nothing."""
    block_bytes = 8192
    block_tokens = 4
    max_examples = examples(20)
    """How many histories the stateful test draws, each of up to ``steps`` steps."""
    steps = 25
    shrink = THOROUGH
    """Look for the shortest history that fails, for up to five minutes; else report the first."""

    def make_tier(self, folder: Path) -> StorageTier:
        """A tier with room for 4 to 64 blocks of ``block_bytes`` bytes.

        A durable tier stores them in ``folder``, or under its name: a tier made later with the
        same folder finds them, one with another folder does not.
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
            assert cache_level(tier.medium) is not None, "set StorageTier.medium to a known one"
            assert tier.memory in Memory
            assert tier.backend
            parameters = tier.backend_parameters
            assert all(isinstance(text, str) for text in (*parameters, *parameters.values()))
            assert tier.statistics().capacity >= 4

    def test_lives_by_the_rules(self) -> None:
        """Random histories compared with a dictionary; see ``TierMachine``."""

        class Machine(TierMachine):
            contract = self

        gc.freeze()  # so that collections after a crash visit only objects of the test
        try:
            run_state_machine_as_test(
                Machine,
                settings=settings(
                    phases=tuple(Phase) if self.shrink else (Phase.generate,),
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
        """NIXL may still write to a slot whose store was abandoned."""
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
                tier.commit([StoredBlock(key=self._key(2), slot=slot, size_bytes=1, checksum=0)])
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
            return  # refusing is allowed, too
        with other:
            assert other.recovered == []
            assert other.get(self._key(1)) is None


@define
class _Reader:
    stored: StoredBlock
    block: bytes
    rewritten: bool = False
    """The same name was written again, in a ``named`` tier."""


class TierMachine(RuleBasedStateMachine):
    """After every step, the tier has what the dictionary has, and every reader its bytes."""

    contract: TierContract
    """Opens the tier under test, and describes it."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="tier-")
        self._user = self.contract.use(Path(self._folder.name))
        self._model: dict[BlockKey, bytes] = {}
        self._begun: dict[Slot, tuple[StoredBlock, bytes]] = {}
        self._readers: list[_Reader] = []
        self._loose: dict[BlockKey, bytes] = {}
        """Written under their names and not committed, or evicted and not deleted before a crash:
        these may be found, intact."""

    def teardown(self) -> None:
        self._user.close()
        self._folder.cleanup()

    @rule(key=_keys, seed=st.integers(0, 1 << 32))
    def put(self, key: BlockKey, seed: int) -> None:
        slot = self._reserve(key)
        if slot is not None:
            block = self._block(seed)
            self._user.tier.commit([self._write(slot, key, block)])
            self._model[key] = block

    @rule(keys=st.lists(_keys, min_size=2, max_size=4, unique=True), seed=st.integers(0, 1 << 32))
    def put_many(self, keys: Sequence[BlockKey], seed: int) -> None:
        slots = self._user.tier.reserve(keys)
        blocks = {key: self._block(seed + n) for n, key in enumerate(keys)}
        given = [(key, slot) for key, slot in zip(keys, slots, strict=True) if slot is not None]
        self._user.tier.commit([self._write(slot, key, blocks[key]) for key, slot in given])
        self._model |= {key: blocks[key] for key, _ in given}

    @rule(key=_keys, seed=st.integers(0, 1 << 32))
    def begin(self, key: BlockKey, seed: int) -> None:
        slot = self._reserve(key)
        if slot is not None:
            block = self._block(seed)
            self._begun[slot] = self._write(slot, key, block), block

    @precondition(lambda self: self._begun)
    @rule(data=st.data(), commit=st.booleans())
    def end(self, data: st.DataObject, *, commit: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self._begun)))
        stored, block = self._begun.pop(slot)
        if commit:
            self._user.tier.commit([stored])
            self._model[stored.key] = block
        else:
            self._user.tier.release([slot])
            self._leave(stored.key, block)

    @rule(key=_keys)
    def get(self, key: BlockKey) -> None:
        assert self._user.get(key) == self._model.get(key), "the bytes of a committed block changed"

    @precondition(lambda self: self._model)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self._model)))
        (stored,) = self._user.find(key)
        assert stored is not None
        self._user.tier.pin(stored.slot)
        self._readers.append(_Reader(stored, self._model[key]))

    @precondition(lambda self: self._readers)
    @rule(data=st.data())
    def read_and_unpin(self, data: st.DataObject) -> None:
        reader = self._readers.pop(data.draw(st.integers(0, len(self._readers) - 1)))
        if not reader.rewritten:
            assert self._user.read(reader.stored) == reader.block, (
                "a block's bytes changed while a reader had it pinned: they must stay until unpin, "
                "also when the block is evicted"
            )
        self._user.tier.unpin(reader.stored.slot)

    @rule(keys=st.lists(_keys, min_size=1, max_size=3))
    def evict(self, keys: Sequence[BlockKey]) -> None:
        self._user.tier.evict(keys)
        for key in keys:
            self._model.pop(key, None)

    @rule(keys=st.lists(_keys, min_size=1, max_size=3))
    def make_room(self, keys: Sequence[BlockKey]) -> None:
        """Blocks that others stored stay, and an earlier instance counts as another."""
        self._user.tier.make_room(keys)
        for key in keys:
            if (block := self._model.pop(key, None)) is not None:
                self._leave(key, block)

    @rule()
    def restart(self) -> None:
        self._user.close()
        self._begin_anew()

    @rule()
    def crash(self) -> None:
        for reader in self._readers:
            if not reader.rewritten and reader.stored.key not in self._model:
                self._leave(reader.stored.key, reader.block)
        self._user.crash()
        self._begin_anew()

    @invariant()
    def has_what_the_model_has(self) -> None:
        for key, stored in zip(_KEYS, self._user.find(*_KEYS), strict=True):
            if stored is not None and key in self._loose:
                self._model[key] = self._loose.pop(key)
                assert self._user.get(key) == self._model[key], "the bytes found are others"
            if key in self._model:
                assert stored is not None, "lookup: a committed block is not found"
            else:
                assert stored is None, "lookup: a block is found that is not committed"
            assert stored is None or stored.key == key, "lookup: the block of another key is found"
        if not self._user.tier.shared:
            kept = {stored.key for stored in self._user.tier.committed()}
            assert kept == set(self._model), "committed(): not the blocks that are committed"
            statistics = self._user.tier.statistics()
            assert statistics.committed == len(self._model), "statistics().committed is wrong"
            assert statistics.reserved == len(self._begun), "statistics().reserved is wrong"
            pinned = len({reader.stored.slot for reader in self._readers})
            assert statistics.pinned == pinned, "statistics().pinned is wrong"

    def _begin_anew(self) -> None:
        """Uncommitted blocks are lost; in a tier that is not durable, all blocks are."""
        for stored, block in self._begun.values():
            self._leave(stored.key, block)
        self._begun.clear()
        self._readers.clear()
        if not self.contract.durable:
            self._model.clear()
        self._user = self.contract.use(Path(self._folder.name))
        found = {stored.key for stored in self._user.recovered}
        assert len(found) == len(self._user.recovered), "one block was recovered twice"
        self._model |= {key: self._loose.pop(key) for key in found & self._loose.keys()}
        assert found <= set(self._model), "an uncommitted or evicted block came back"
        if not self._user.tier.shared:
            assert found == set(self._model), "a committed block is lost"
        for key, block in self._model.items():
            assert self._user.get(key) == block, "a block has other bytes after a restart"

    def _reserve(self, key: BlockKey) -> Slot | None:
        (slot,) = self._user.tier.reserve([key])
        begun = {stored.key for stored, _ in self._begun.values()}
        if key in self._model or key in begun:
            assert slot is None, "there is a slot for this key already"
            return None
        in_use = {reader.stored.slot for reader in self._readers} | set(self._begun)
        in_use |= {stored.slot for stored in self._user.tier.committed()}
        if len(in_use) < self._user.tier.statistics().capacity:
            assert slot is not None, "there is room, but no slot was given"
        assert slot not in in_use, "reserve: gave away a slot that is in use"
        return slot

    def _write(self, slot: Slot, key: BlockKey, block: bytes) -> StoredBlock:
        if self.contract.named:
            self._loose.pop(key, None)
            for reader in self._readers:
                reader.rewritten |= reader.stored.key == key
        return self._user.write(slot, key, block)

    def _leave(self, key: BlockKey, block: bytes) -> None:
        if self.contract.named:
            self._loose[key] = block

    def _block(self, seed: int) -> bytes:
        """Different bytes for each seed, and often a different length."""
        rng, full = random.Random(seed), self.contract.block_bytes
        return rng.randbytes(rng.choice((1, full // 2, full)))
