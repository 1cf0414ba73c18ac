"""The leases of an exporter, in any order of events: a held block comes back exactly once."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from commutator_engine_kit.kv.transfer.exporter import BlockExporter
from commutator_engine_kit.kv.transfer.protocol import ExportState, ReadyBlock

LEASE_S = 10.0
ids = st.sampled_from("abcde")


class ExportMachine(RuleBasedStateMachine):
    """Against a model that keeps lists."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.exports = BlockExporter(lambda: None, clock=lambda: self.now_s)
        self.blocks = 0
        self.held: dict[str, list[int]] = {}
        self.told: dict[str, int] = {}
        self.ends_s: dict[str, float] = {}
        self.complete: set[str] = set()
        self.over: set[str] = set()
        self.freed: list[int] = []

    @rule(name=ids)
    def begin(self, name: str) -> None:
        if name in self.held:
            return
        wanted = self.exports.begin(name, LEASE_S)
        assert wanted == (name not in self.over)
        if wanted:
            self.held[name], self.told[name] = [], 0
            self.ends_s[name] = self.now_s + LEASE_S

    @rule(name=ids, count=st.integers(0, 4))
    def hold(self, name: str, count: int) -> None:
        blocks = list(range(self.blocks, self.blocks + count))
        assert self.exports.hold(name, blocks) == (name in self.held)
        if name in self.held:
            self.held[name] += blocks
            self.blocks += count

    @rule(name=ids)
    def publish(self, name: str) -> None:
        held = self.held.get(name, [])
        told = self.told.get(name, 0)
        ready = [ReadyBlock(block, bytes([block % 256]), block) for block in held[told:]]
        self.exports.publish(name, ready)
        if name in self.held:
            self.told[name] = len(held)

    @rule(name=ids)
    def complete_it(self, name: str) -> None:
        self.exports.complete(name)
        if name in self.held:
            self.complete.add(name)

    @rule(name=ids, have=st.integers(0, 6))
    def watch(self, name: str, have: int) -> None:
        news = self.exports.news(name, have)
        if name in self.held:
            told = self.held[name][: self.told[name]]
            assert [block.index for block in news.blocks] == told[have:]
            done = name in self.complete and len(told) == len(self.held[name])
            assert news.state is (ExportState.COMPLETE if done else ExportState.RUNNING)
            self.ends_s[name] = self.now_s + LEASE_S
        else:
            assert not news.blocks
            gone = ExportState.FAILED if name in self.over else ExportState.UNKNOWN
            assert news.state is gone
            assert bool(news.reason) == (name in self.over)

    @rule(name=ids, how=st.sampled_from(["release", "fail"]))
    def end(self, name: str, how: str) -> None:
        if how == "release":
            self.exports.release(name)
        else:
            self.exports.fail(name, "aborted")
        freed = self.exports.take_freed()
        assert freed == self.held.pop(name, [])
        self._ended(name, freed)

    @rule(passed_s=st.floats(0, 12))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        lapsed = [name for name in self.held if self.ends_s[name] <= self.now_s]
        self.exports.expire()
        freed = self.exports.take_freed()
        assert sorted(freed) == sorted(block for name in lapsed for block in self.held[name])
        for name in lapsed:
            self._ended(name, self.held.pop(name))

    @invariant()
    def what_is_held_is_known(self) -> None:
        assert sorted(self.exports.held()) == sorted(b for held in self.held.values() for b in held)
        assert self.exports.statistics().active == len(self.held)

    def teardown(self) -> None:
        self.freed += self.exports.fail_all("the engine begins anew")
        assert sorted(self.freed) == list(range(self.blocks))
        assert not self.exports.held()

    def _ended(self, name: str, freed: list[int]) -> None:
        self.freed += freed
        self.over.add(name)
        self.complete.discard(name)


TestExports = ExportMachine.TestCase
TestExports.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
