"""KV events: the wire format of the field, both encodings, and replay."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import zmq

from commutator.contract.block import BlockRemoved, BlocksCleared, BlockStored, EventBatch
from commutator.kv_events.codec import decode_batch, encode_batch
from commutator_engine_kit import EventPublisher

STORED = BlockStored(
    block_hashes=(2**64 - 1, 5),
    parent_block_hash=None,
    token_ids=tuple(range(32)),
    block_size=16,
    adapter="a",
    medium="GPU",
)


def test_round_trip() -> None:
    batch = EventBatch(
        timestamp_s=1.5,
        events=(STORED, BlockRemoved(block_hashes=(b"\x01",), medium="CPU"), BlocksCleared()),
        data_parallel_rank=3,
    )
    assert decode_batch(encode_batch(batch)) == batch


def test_a_salt_survives_the_round_trip() -> None:
    batch = EventBatch(
        timestamp_s=0.0,
        events=(
            BlockStored(
                block_hashes=(1,),
                parent_block_hash=None,
                token_ids=(1, 2),
                block_size=2,
                cache_salt="t",
            ),
        ),
    )
    assert decode_batch(encode_batch(batch)) == batch


def test_maps_with_defaults_left_out() -> None:
    event = {"type": "BlockStored", "block_hashes": [-7], "token_ids": [1, 2], "block_size": 2}
    body = msgspec.msgpack.encode([0.0, [event, {"type": "AllBlocksCleared"}, {"type": "New"}]])
    assert decode_batch(body).events == (
        BlockStored(
            block_hashes=(-7,), parent_block_hash=None, token_ids=(1, 2), block_size=2, medium=None
        ),
        BlocksCleared(),
    )


def test_the_older_arrays() -> None:
    events = [["BlockStored", [1], None, [1, 2], 2, None, "GPU"], ["BlockRemoved", [1], "CPU"]]
    body = msgspec.msgpack.encode([0.0, events, 1])
    assert decode_batch(body) == EventBatch(
        timestamp_s=0.0,
        events=(
            BlockStored(block_hashes=(1,), parent_block_hash=None, token_ids=(1, 2), block_size=2),
            BlockRemoved(block_hashes=(1,), medium="CPU"),
        ),
        data_parallel_rank=1,
    )


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x01", b"\x90", msgspec.msgpack.encode([0, [{"type": "BlockStored"}]])]
)
def test_invalid_bytes_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(body)


STORED_MAP = {
    "type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2,
}  # fmt: skip
REMOVED_MAP = {"type": "BlockRemoved", "block_hashes": [1]}


@pytest.mark.security
@pytest.mark.parametrize(
    "batch",
    [
        [0.0, [STORED_MAP], 1024],
        [0.0, [STORED_MAP], -1],
        [0.0, [STORED_MAP], "0"],
        ["now", [STORED_MAP], 0],
        [0.0, [STORED_MAP | {"block_size": 2.5}], 0],
        [0.0, [STORED_MAP | {"block_size": 1e400}], 0],
        [0.0, [STORED_MAP | {"block_hashes": [[1]]}], 0],
        [0.0, [STORED_MAP | {"block_hashes": "12"}], 0],
        [0.0, [STORED_MAP | {"parent_block_hash": [1]}], 0],
        [0.0, [STORED_MAP | {"medium": 7}], 0],
        [0.0, [STORED_MAP | {"lora_name": {}}], 0],
        [0.0, [STORED_MAP | {"group_idx": "x"}], 0],
        [0.0, [REMOVED_MAP | {"block_hashes": [None]}], 0],
        [0.0, [REMOVED_MAP | {"medium": []}], 0],
        [0.0, [STORED_MAP, 7], 0],
    ],
    ids=lambda batch: str(batch)[:120],
)
def test_what_is_no_batch_of_events_is_refused_whole(batch: list[object]) -> None:
    """Each rank takes memory at the reader, and each value ends up in its index."""
    assert decode_batch(msgspec.msgpack.encode([0.0, [STORED_MAP, REMOVED_MAP], 1023])).events
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(msgspec.msgpack.encode(batch))


@pytest.mark.security
def test_lists_in_lists_are_a_value_error() -> None:
    with pytest.raises(ValueError, match="not a batch of KV events"):
        decode_batch(b"\x91" * 100_000)


@pytest.mark.security
def test_a_reader_that_asks_at_length_is_disconnected() -> None:
    publisher = EventPublisher(keep_messages=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.setsockopt(zmq.LINGER, 0)
        assert publisher.source.replay_endpoint is not None
        monitor = reader.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        reader.connect(publisher.source.replay_endpoint)
        reader.send_multipart([b"", b"x" * 5000])
        assert monitor.poll(20_000)
        reader.disable_monitor()
        monitor.close()
        reader.send_multipart([b"", (0).to_bytes(8, "big")])
        assert reader.poll(20_000), "it may ask again as others do"
    publisher.close()


def test_published_and_replayed() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = EventPublisher(topic="kv")
    subscriber, dealer = context.socket(zmq.SUB), context.socket(zmq.DEALER)
    subscriber.connect(publisher.source.endpoint)
    subscriber.subscribe("kv")
    assert publisher.source.replay_endpoint is not None
    dealer.connect(publisher.source.replay_endpoint)
    try:
        while not subscriber.poll(50):  # a subscription takes a moment to arrive
            publisher.publish([STORED])
        topic, sequence, body = subscriber.recv_multipart()
        assert topic == b"kv"
        assert decode_batch(body).events == (STORED,)
        for _ in range(3):
            publisher.publish([BlocksCleared()])
        dealer.send_multipart([b"", sequence])
        replayed = []
        while True:
            assert dealer.poll(2000)
            _, _, number, body = dealer.recv_multipart()
            if not body:
                assert int.from_bytes(number, "big", signed=True) == -1
                break
            replayed.append(int.from_bytes(number, "big"))
        first = int.from_bytes(sequence, "big")
        assert replayed == list(range(first, first + len(replayed)))
        assert len(replayed) >= 1
    finally:
        publisher.close()
        context.destroy(linger=0)


@pytest.mark.parametrize(
    ("fields", "salt"),
    [
        ({"cache_salt": "t"}, "t"),
        ({"extra_keys": [["t"], None]}, "t"),
        ({"extra_keys": [["a", "t"], ["a"]], "lora_name": "a"}, "t"),
        ({"extra_keys": [["a"]], "lora_name": "a"}, None),
        ({"extra_keys": [None, None]}, None),
        ({"extra_keys": [[["image", 3], "t"]]}, "[['image', 3], 't']"),
    ],
)
def test_the_salt_as_each_engine_tells_it(fields: dict[str, object], salt: str | None) -> None:
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}
    body = msgspec.msgpack.encode([0.0, [event | fields]])
    (decoded,) = decode_batch(body).events
    assert isinstance(decoded, BlockStored)
    assert decoded.cache_salt == salt


@pytest.mark.parametrize(
    ("given", "adapter"),
    [
        ({}, None),
        ({"lora_name": "sql", "lora_id": 7}, "sql"),
        ({"lora_id": 7}, "lora_id 7"),
        ({"lora_name": "", "lora_id": 7}, "lora_id 7"),
    ],
)
def test_blocks_of_an_adapter_without_a_name_are_kept_apart(
    given: dict[str, Any], adapter: str | None
) -> None:
    body = msgspec.msgpack.encode([0.0, [STORED_MAP | given], 0])
    (event,) = decode_batch(body).events
    assert isinstance(event, BlockStored)
    assert event.adapter == adapter
