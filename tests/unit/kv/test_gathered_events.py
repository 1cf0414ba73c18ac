"""Events published within a short time go out as one message, in order, and none is lost."""

from __future__ import annotations

import zmq

from commutator.kv import BlockRemoved, EventPublisher, KvEvent, decode_batch


def test_one_message_for_what_comes_together() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = EventPublisher(gather_s=0.2)
    dealer = context.socket(zmq.DEALER)
    assert publisher.source.replay_endpoint is not None
    dealer.connect(publisher.source.replay_endpoint)
    try:
        for block in range(5):
            publisher.publish([BlockRemoved((block,))])
        bodies: list[bytes] = []
        while not bodies:
            dealer.send_multipart([b"", (0).to_bytes(8, "big")])
            while True:
                assert dealer.poll(5000)
                *_, body = dealer.recv_multipart()
                if not body:
                    break
                bodies.append(body)
        assert len(bodies) == 1
        assert decode_batch(bodies[0]).events == tuple(BlockRemoved((n,)) for n in range(5))
    finally:
        publisher.close()
        context.destroy(linger=0)


def test_the_last_events_are_sent_before_the_end() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = EventPublisher(gather_s=0.1)
    subscriber = context.socket(zmq.SUB)
    subscriber.connect(publisher.source.endpoint)
    subscriber.subscribe("")
    try:
        while not subscriber.poll(200):  # a subscription takes a moment to arrive
            publisher.publish([BlockRemoved((0,))])
        publisher.publish([BlockRemoved((1,))])
        publisher.close()
        events: list[KvEvent] = []
        while subscriber.poll(1000) and BlockRemoved((1,)) not in events:
            *_, body = subscriber.recv_multipart()
            events += decode_batch(body).events
        assert BlockRemoved((1,)) in events
    finally:
        publisher.close()
        context.destroy(linger=0)
