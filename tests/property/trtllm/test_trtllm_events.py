"""The index has what the server has cached, whichever events are lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.trtllm.queues import removed, stored

from commutator.contract.block import BlocksCleared, BlockStored, EventBatch
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator.routing.prefix_index.hashing import sequence_hashes
from commutator.routing.prefix_index.index import PrefixIndex
from commutator_trtllm.event_translator import CacheEvent, EventTranslator

SIZE = 4
WINDOW = 512

# A step of a server: cache a prompt, or let go of the cached block that was last stored.
prompts = st.lists(st.integers(0, 2), min_size=SIZE, max_size=4 * SIZE).map(tuple)
steps = st.lists(st.one_of(prompts, st.none()), max_size=12)
big = st.integers((1 << 53) + 1, (1 << 64) - 100)


class Server:
    """Caches chains of blocks and publishes each change."""

    def __init__(self, names: Iterator[int]) -> None:
        self.names = names
        self.held: dict[tuple[int, ...], int] = {}
        """The name of each block, by all tokens up to its end."""
        self.told: list[dict[str, Any]] = []
        self.number = 0
        self.tell({"type": "created", "num_blocks_per_cache_level": [9, 0]})

    def tell(self, data: dict[str, Any]) -> None:
        self.told.append({"event_id": self.number, "data": data, "window_size": WINDOW})
        self.number += 1

    def cache(self, prompt: tuple[int, ...]) -> None:
        parent = None
        for end in range(SIZE, len(prompt) + 1, SIZE):
            prefix = prompt[:end]
            if prefix not in self.held:
                self.held[prefix] = next(self.names)
                tokens = prefix[-SIZE:]
                self.tell(
                    stored(
                        BlockStored(
                            block_hashes=(self.held[prefix],),
                            parent_block_hash=parent,
                            token_ids=tokens,
                            block_size=SIZE,
                        )
                    )
                )
            parent = self.held[prefix]

    def released(self) -> None:
        if self.held:
            self.tell(removed([self.held.popitem()[1]]))

    def step(self, prompt: tuple[int, ...] | None) -> None:
        self.released() if prompt is None else self.cache(prompt)


def read(told: list[dict[str, Any]]) -> list[CacheEvent]:
    return msgspec.json.decode(msgspec.json.encode(told), type=list[CacheEvent])


def apply(index: PrefixIndex, translator: EventTranslator, told: list[dict[str, Any]]) -> None:
    """The path of events: HTTP, translation, ZMQ, index."""
    events = tuple(translator.translate(read(told)))
    for event in decode_batch(encode_batch(EventBatch(timestamp_s=0.0, events=events))).events:
        index.apply("w", event)


def holds(index: PrefixIndex, prefix: tuple[int, ...]) -> bool:
    return index.holds("w", sequence_hashes(prefix, SIZE)[-1])


@given(steps, big, prompts)
def test_the_index_is_what_the_server_holds(
    taken: list[tuple[int, ...] | None], first: int, other: tuple[int, ...]
) -> None:
    server = Server(itertools.count(first))
    translator, index = EventTranslator(SIZE), PrefixIndex(SIZE)
    for prompt in taken:
        server.step(prompt)
    apply(index, translator, server.told)
    assert index.statistics().blocks == len(server.held) == translator.blocks
    assert all(holds(index, prefix) for prefix in server.held)
    whole = other[: len(other) // SIZE * SIZE]
    assert holds(index, whole) == (whole in server.held)
    assert (translator.gaps, translator.restarts) == (0, 0)


@given(steps, st.data())
def test_lost_events_never_leave_a_block_that_is_gone(
    taken: list[tuple[int, ...] | None], data: st.DataObject
) -> None:
    server, translator, index = (
        Server(itertools.count(1)),
        EventTranslator(SIZE),
        PrefixIndex(SIZE),
    )
    for prompt in taken:
        server.step(prompt)
    lost = data.draw(st.sets(st.integers(0, len(server.told) - 1)))
    told = [event for number, event in enumerate(server.told) if number not in lost]
    if told and told[-1] is not server.told[-1]:
        told.append(server.told[-1])  # a later event shows that some are missing
    apply(index, translator, told)
    for prefix in _prefixes(server):
        assert prefix in server.held or not holds(index, prefix)
    assert translator.restarts == 0


def _prefixes(server: Server) -> set[tuple[int, ...]]:
    """Every chain that was ever cached."""
    chains: dict[int, tuple[int, ...]] = {}
    for event in server.told:
        parent = event["data"].get("parent_hash")
        for block in event["data"].get("blocks", ()):
            tokens = tuple(token["token_id"] for token in block["tokens"])
            chains[block["block_hash"]] = chains.get(parent, ()) + tokens
            parent = block["block_hash"]
    return set(chains.values())


@given(steps, steps)
def test_a_restarted_server_begins_with_nothing(
    before: list[tuple[int, ...] | None], after: list[tuple[int, ...] | None]
) -> None:
    translator, index = EventTranslator(SIZE), PrefixIndex(SIZE)
    for taken in (before, after):
        server = Server(itertools.count(1))
        for prompt in taken:
            server.step(prompt)
        apply(index, translator, server.told)
    assert translator.restarts == 1
    assert index.statistics().blocks == len(server.held)
    assert all(holds(index, prefix) for prefix in server.held)


def test_what_others_must_not_match_is_left_out() -> None:
    """Images, adapters, parts of blocks, and the blocks that follow them."""
    whole = BlockStored(
        block_hashes=(1, 2, 3), parent_block_hash=None, token_ids=tuple(range(12)), block_size=SIZE
    )
    for change in (
        {"lora_id": 7},
        {"mm_keys": [["hash", 0]]},
        {"tokens": [{"token_id": 4, "token_extra_id": 9}] * SIZE},
        {"tokens": [{"token_id": 4}]},
    ):
        data = stored(whole)
        data["blocks"][1] |= change
        translator = EventTranslator(SIZE)
        after = {
            "event_id": 1,
            "data": stored(
                BlockStored(
                    block_hashes=(4,), parent_block_hash=3, token_ids=(1, 2, 3, 4), block_size=SIZE
                )
            ),
        }
        told = translator.translate(read([{"event_id": 0, "data": data}, after]))
        assert [event.block_hashes for event in told if isinstance(event, BlockStored)] == [(1,)]


def test_a_block_that_moves_is_found_where_it_is() -> None:
    translator, index = EventTranslator(SIZE), PrefixIndex(SIZE)
    moved = {
        "type": "updated",
        "block_hash": 1,
        "cache_level": {"type": "event_diff", "old_value": 0, "new_value": 1},
        "priority": None,
    }
    one = BlockStored(
        block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=SIZE
    )
    (hash_,) = sequence_hashes([1, 2, 3, 4], SIZE)
    apply(index, translator, [{"event_id": 0, "data": stored(one)}])
    apply(index, translator, [{"event_id": 1, "data": moved}])
    (overlap,) = index.match([hash_]).values()
    assert (overlap.device, overlap.host) == (0, 1)
    apply(index, translator, [{"event_id": 2, "data": removed([1])}])
    assert index.match([hash_]) == {}


def test_narrow_windows_and_other_ranks_are_not_followed() -> None:
    one = stored(
        BlockStored(
            block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2, 3, 4), block_size=SIZE
        )
    )
    translator = EventTranslator(SIZE)
    told = read(
        [
            {"event_id": 0, "data": one, "window_size": 128},
            {"event_id": 1, "data": one, "window_size": 512},
            {"event_id": 2, "data": one, "window_size": 128},
            {"event_id": 9, "data": one, "window_size": 512, "attention_dp_rank": 1},
        ]
    )
    kinds = [type(event) for event in translator.translate(told)]
    assert kinds == [BlockStored, BlocksCleared, BlockStored]
    assert translator.gaps == 0
