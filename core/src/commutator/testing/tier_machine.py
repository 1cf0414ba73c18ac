"""The life of a tier against a dictionary: puts, gets, readers, evictions, crashes, restarts."""

from __future__ import annotations

import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from attrs import define
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from commutator.kv.keys import KEY_BYTES, BlockKey
from commutator.kv.tier import Slot, Stored
from commutator.testing.tier_user import TierUser

__all__ = ["TierLives", "TierMachine"]

_KEYS = [bytes([number]) * KEY_BYTES for number in range(1, 8)]
_keys = st.sampled_from(_KEYS)


class TierLives(ABC):
    """What the machine wants to know of the tier under test."""

    durable: bool
    named: bool
    block_bytes: int

    @abstractmethod
    def open(self, folder: Path) -> TierUser:
        """A new instance of the tier, in a folder where former instances may have left blocks."""


@define
class _Reader:
    stored: Stored
    block: bytes
    rewritten: bool = False
    """The same name was written again, in a tier whose bytes are ``named``."""


class TierMachine(RuleBasedStateMachine):
    """After every step, the tier has what the dictionary has, and every reader its bytes."""

    def __init__(self, lives: TierLives) -> None:
        super().__init__()
        self._lives = lives
        self._folder = tempfile.TemporaryDirectory(prefix="tier-")
        self._user = self._open()
        self._model: dict[BlockKey, bytes] = {}
        self._begun: dict[Slot, tuple[Stored, bytes]] = {}
        self._readers: list[_Reader] = []
        self._loose: dict[BlockKey, bytes] = {}
        """Written under their names and not committed, or evicted and not deleted before a crash:
        these may be found, whole."""

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
        assert self._user.get(key) == self._model.get(key)

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
            assert self._user.read(reader.stored) == reader.block, "overwritten while pinned"
        self._user.tier.unpin(reader.stored.slot)

    @rule(keys=st.lists(_keys, min_size=1, max_size=3))
    def evict(self, keys: Sequence[BlockKey]) -> None:
        self._user.tier.evict(keys)
        for key in keys:
            self._model.pop(key, None)

    @rule(keys=st.lists(_keys, min_size=1, max_size=3))
    def make_room(self, keys: Sequence[BlockKey]) -> None:
        """What others stored stays with those, and a former life is another."""
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
                assert self._user.get(key) == self._model[key]
            assert (stored is not None) == (key in self._model)
            assert stored is None or stored.key == key
        if not self._user.tier.shared:
            assert {stored.key for stored in self._user.tier.committed()} == set(self._model)
            statistics = self._user.tier.statistics()
            assert statistics.committed == len(self._model)
            assert statistics.reserved == len(self._begun)
            assert statistics.pinned == len({reader.stored.slot for reader in self._readers})

    def _open(self) -> TierUser:
        return self._lives.open(Path(self._folder.name))

    def _begin_anew(self) -> None:
        """All that was not committed is gone, and in a tier that is not durable, the rest, too."""
        for stored, block in self._begun.values():
            self._leave(stored.key, block)
        self._begun.clear()
        self._readers.clear()
        if not self._lives.durable:
            self._model.clear()
        self._user = self._open()
        found = {stored.key for stored in self._user.recovered}
        assert len(found) == len(self._user.recovered), "one block was recovered twice"
        self._model |= {key: self._loose.pop(key) for key in found & self._loose.keys()}
        assert found <= set(self._model), "what was never committed, or was evicted, came back"
        if not self._user.tier.shared:
            assert found == set(self._model), "what was committed is lost"
        for key, block in self._model.items():
            assert self._user.get(key) == block

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
        assert slot not in in_use
        return slot

    def _write(self, slot: Slot, key: BlockKey, block: bytes) -> Stored:
        if self._lives.named:
            self._loose.pop(key, None)
            for reader in self._readers:
                reader.rewritten |= reader.stored.key == key
        return self._user.write(slot, key, block)

    def _leave(self, key: BlockKey, block: bytes) -> None:
        if self._lives.named:
            self._loose[key] = block

    def _block(self, seed: int) -> bytes:
        """Different bytes for each seed, and often a different length."""
        rng = random.Random(seed)
        return rng.randbytes(rng.choice((1, self._lives.block_bytes // 2, self._lives.block_bytes)))
