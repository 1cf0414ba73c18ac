"""What readers of KV events cost the worker, and who may read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event

import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from commutator.contract.block import BlockStored
from commutator.kv_events.publisher import MessageHistory, _Replay
from commutator.trust import SECRET_FILE, RunSecret
from commutator_engine_kit import EventPublisher

STORED = BlockStored(
    block_hashes=(1,),
    parent_block_hash=None,
    token_ids=tuple(range(12_000)),
    block_size=12_000,
)


def kept_messages(count: int, most: int) -> MessageHistory:
    kept = MessageHistory(most)
    for number in range(count):
        assert kept.append(str(number).encode()) == number
    return kept


@given(
    st.integers(0, 60),
    st.integers(1, 40),
    st.integers(0, 80),
    st.lists(st.integers(0, 9), max_size=80),
)
def test_a_replay_sends_every_kept_message_once_and_in_order_whenever_there_is_room(
    count: int, most: int, first: int, room: list[int]
) -> None:
    kept, sent = kept_messages(count, most), list[int]()
    replay = _Replay(first, clock=lambda: 0.0)
    for free in [*room, 10_000]:
        left = [free]

        def send(sequence: int, body: bytes, left: list[int] = left) -> bool:
            if not left[0]:
                return False
            left[0] -= 1
            assert body == (b"" if sequence < 0 else str(sequence).encode())
            sent.append(sequence)
            return True

        if not replay.go_on(kept, send):
            break
    oldest = max(first, count - min(count, most))
    assert sent == [*range(oldest, count), -1]


@pytest.mark.security
def test_a_replay_ends_when_its_reader_has_gone_or_takes_nothing_for_too_long() -> None:
    now_s = 0.0
    kept = kept_messages(3, 3)
    assert not _Replay(0, clock=lambda: now_s).go_on(kept, lambda *_: None)
    replay = _Replay(0, clock=lambda: now_s)
    assert replay.go_on(kept, lambda *_: False)
    now_s = 29.0
    assert replay.go_on(kept, lambda sequence, _: sequence == 0), "one message was taken"
    now_s = 58.0
    assert replay.go_on(kept, lambda *_: False)
    now_s = 60.0
    assert not replay.go_on(kept, lambda *_: False)


@contextmanager
def reader(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str | None, *, takes: int = 0
) -> Iterator[zmq.Socket[bytes]]:
    """Asked for everything; ``takes`` messages fit into its own memory, 0: any number."""
    assert endpoint is not None
    with context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.set_hwm(takes)
        dealer.connect(endpoint)
        dealer.send_multipart([b"", bytes(8)])
        yield dealer


def numbers(dealer: zmq.Socket[bytes]) -> list[int]:
    """The sequences of a whole replay."""
    found: list[int] = []
    while not found or found[-1] >= 0:
        assert dealer.poll(20_000)
        found.append(int.from_bytes(dealer.recv_multipart()[2], "big", signed=True))
    return found[:-1]


@pytest.mark.security
def test_readers_of_replays_that_never_read_do_not_grow_the_worker() -> None:
    messages, stalled = 1000, 20
    publisher, context = EventPublisher(keep_messages=messages), zmq.Context[zmq.Socket[bytes]]()
    try:
        for _ in range(messages):
            publisher.publish([STORED])
        with reader(context, publisher.source.replay_endpoint) as dealer:
            while len(whole := numbers(dealer)) < messages:
                dealer.send_multipart([b"", bytes(8)])
            assert whole == list(range(messages))
        before = psutil.Process().memory_info().rss
        one_replay = messages * 36_000
        with context.socket(zmq.DEALER) as first:
            first.set_hwm(1)
            asked = [first]
            for _ in range(stalled):
                dealer = context.socket(zmq.DEALER)
                dealer.setsockopt(zmq.LINGER, 0)
                dealer.set_hwm(1)
                dealer.connect(str(publisher.source.replay_endpoint))
                dealer.send_multipart([b"", bytes(8)])
                asked.append(dealer)
            with reader(context, publisher.source.replay_endpoint) as dealer:
                assert numbers(dealer) == list(range(messages)), "others are served meanwhile"
            grown = psutil.Process().memory_info().rss - before
            assert grown < stalled * one_replay / 2
            assert numbers(asked[1]) == list(range(messages)), "and a slow one, when it reads"
            for one in asked:
                one.close(linger=0)
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_a_publisher_ends_although_zmq_waits_for_good_for_a_reader_that_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    released, publisher = Event(), EventPublisher()
    term = zmq.Context.term
    monkeypatch.setattr(zmq.Context, "term", lambda context: (released.wait(), term(context)))
    publisher.publish([STORED])
    publisher.close()
    assert not released.is_set()
    released.set()


@pytest.mark.security
def test_in_a_run_events_are_published_in_its_private_folder_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o700)
    RunSecret.new().save(tmp_path / "secret")
    monkeypatch.setenv(SECRET_FILE, str(tmp_path / "secret"))
    publisher, context = EventPublisher(), zmq.Context[zmq.Socket[bytes]]()
    try:
        for endpoint in (publisher.source.endpoint, publisher.source.replay_endpoint):
            assert endpoint is not None
            assert Path(endpoint.removeprefix("ipc://")).parent == tmp_path
        with reader(context, publisher.source.replay_endpoint) as dealer:
            assert numbers(dealer) == []
    finally:
        publisher.close()
        context.destroy(linger=0)
