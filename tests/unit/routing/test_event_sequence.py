"""The order of event messages, one situation at a time."""

from __future__ import annotations

import pytest

from commutator.kv_events.sequence import Apply, EventSequence, GoOn, Position, Replay, Reset


def body(sequence: int, life: str = "a") -> bytes:
    return f"{life}{sequence}".encode()


def started(*, can_replay: bool = True, at: int = 2) -> EventSequence:
    """Messages 0 to ``at`` came live, each in its turn."""
    sequence = EventSequence(can_replay)
    for number in range(at + 1):
        assert sequence.on_live(number, body(number)) == [Apply(body(number))]
    return sequence


def test_a_new_connection_asks_for_everything() -> None:
    sequence = EventSequence(can_replay=True)
    assert sequence.connected() == [Replay(1, 0)]
    assert sequence.on_replayed(1, 0, body(0)) == [Apply(body(0))]
    assert sequence.on_replay_end(1) == []
    assert sequence.on_live(1, body(1)) == [Apply(body(1))]


def test_without_a_replay_endpoint_nothing_is_asked() -> None:
    sequence = EventSequence(can_replay=False)
    assert sequence.connected() == sequence.check() == []
    assert sequence.on_live(7, body(7)) == [Apply(body(7))]


def test_without_a_replay_endpoint_a_new_connection_leaves_nothing_believed() -> None:
    """Messages 0 to 2 of a new life may have passed unheard, and 3 would seem to follow."""
    sequence = started(can_replay=False)
    assert sequence.connected() == [], "the first is reported a little late"
    [reset] = sequence.connected()
    assert isinstance(reset, Reset)
    assert sequence.connected() == [], "there is nothing to forget"
    assert sequence.on_live(3, body(3, "b")) == [Apply(body(3, "b"))]
    assert sequence.counters.resyncs == 1


def test_without_a_replay_endpoint_a_new_life_outruns_the_word_of_its_connection() -> None:
    sequence = started(can_replay=False)
    sequence.connected()
    sequence.on_live(3, body(3))
    reset, apply = sequence.on_live(0, body(0, "b"))
    assert isinstance(reset, Reset)
    assert apply == Apply(body(0, "b"))
    assert sequence.connected() == [], "what is known comes from this connection"
    assert sequence.on_live(1, body(1, "b")) == [Apply(body(1, "b"))]
    assert len(sequence.connected()) == 1, "the next one is reported in time"
    assert len(sequence.on_live(0, body(0, "c"))) == 2
    assert len(sequence.connected()) == 1


def test_a_gap_is_noticed_and_filled_in_order() -> None:
    sequence = started()
    assert sequence.on_live(5, body(5)) == [Replay(1, 2)]
    assert sequence.on_live(6, body(6)) == []
    assert sequence.on_replayed(1, 2, body(2)) == [], "known: shows that nothing lies between"
    assert sequence.on_replayed(1, 3, body(3)) == [Apply(body(3))]
    assert sequence.on_replayed(1, 4, body(4)) == [Apply(body(4))]
    assert sequence.on_replay_end(1) == [Apply(body(5)), Apply(body(6))]
    assert (sequence.counters.gaps, sequence.counters.resyncs) == (1, 0)


def test_a_gap_without_a_replay_endpoint_drops_what_was_known() -> None:
    sequence = started(can_replay=False)
    actions = sequence.on_live(5, body(5))
    assert actions == [Reset("2 messages before 5 are lost"), Apply(body(5))]
    assert (sequence.counters.lost, sequence.counters.resyncs) == (2, 1)


def test_replay_racing_live_events_applies_each_once() -> None:
    """The replay is ahead of the live messages; those that follow late are no restart."""
    sequence = EventSequence(can_replay=True)
    sequence.connected()
    assert sequence.on_live(1, body(1)) == []
    for number in range(4):
        assert sequence.on_replayed(1, number, body(number)) == [Apply(body(number))]
    assert sequence.on_replay_end(1) == []
    assert (sequence.live, sequence.replayed) == (1, 3)
    assert sequence.on_live(2, body(2)) == []
    assert sequence.on_live(3, body(3)) == []
    assert sequence.on_live(4, body(4)) == [Apply(body(4))]
    assert (sequence.counters.passed_over, sequence.counters.restarts) == (3, 0)
    assert not sequence._ahead, "nothing is kept of what can no longer come late"


def test_an_engine_that_restarts_begins_with_nothing() -> None:
    sequence = started()
    actions = sequence.on_live(0, body(0, "b"))
    assert actions == [Reset("the engine restarted: message 0 came again"), Apply(body(0, "b"))]
    assert sequence.on_live(1, body(1, "b")) == [Apply(body(1, "b"))]


def test_a_restart_noticed_late_asks_for_the_beginning() -> None:
    sequence = started(at=5)
    reset, replay = sequence.on_live(1, body(1, "b"))
    assert isinstance(reset, Reset)
    assert replay == Replay(1, 0)
    assert sequence.on_replayed(1, 0, body(0, "b")) == [Apply(body(0, "b"))]
    assert sequence.on_replay_end(1) == [Apply(body(1, "b"))]


def test_the_message_itself_shows_a_restart_while_the_replay_was_ahead() -> None:
    sequence = EventSequence(can_replay=True)
    sequence.connected()
    for number in range(4):
        sequence.on_replayed(1, number, body(number))
    sequence.on_replay_end(1)
    reset, again = sequence.on_live(0, body(0, "b"))
    assert isinstance(reset, Reset)
    assert again == Apply(body(0, "b"))


def test_a_restart_during_a_broken_connection_is_found_though_the_numbers_go_on() -> None:
    sequence = started()
    assert sequence.connected() == [Replay(1, 2)]
    reset, replay = sequence.on_replayed(1, 2, body(2, "b"))
    assert isinstance(reset, Reset)
    assert replay == Replay(2, 0)


def test_after_a_new_connection_a_failed_replay_leaves_nothing_believed() -> None:
    """Messages 0 to 2 of a new life may have passed unheard, and 3 would seem to follow."""
    sequence = started()
    sequence.connected()
    assert sequence.on_live(3, body(3, "b")) == []
    reset, replay = sequence.on_replay_failed(1)
    assert isinstance(reset, Reset)
    assert replay == Replay(2, 0)
    assert sequence.on_replay_failed(2) == [Apply(body(3, "b"))]


def test_what_waited_before_a_new_connection_may_be_of_the_old_life() -> None:
    sequence = EventSequence(can_replay=True)
    sequence.connected()
    sequence.on_live(0, body(0, "a"))
    sequence.connected()
    assert sequence.on_replay_end(2) == [], "the new life has sent nothing yet"
    assert sequence.on_live(1, body(1, "b")) == [Replay(3, 0)]


def test_the_next_message_without_the_last_one_proves_nothing() -> None:
    sequence = started()
    sequence.connected()
    reset, apply = sequence.on_replayed(1, 3, body(3))
    assert isinstance(reset, Reset)
    assert apply == Apply(body(3))


def test_a_restarted_engine_that_has_sent_less_is_found() -> None:
    sequence = started()
    sequence.connected()
    reset, replay = sequence.on_replay_end(1)
    assert isinstance(reset, Reset)
    assert replay == Replay(2, 0)
    assert sequence.on_replay_end(2) == []
    assert sequence.position is None


def test_full_resync_when_the_replay_does_not_reach_back() -> None:
    sequence = started()
    assert sequence.on_live(9, body(9)) == [Replay(1, 2)]
    actions = sequence.on_replayed(1, 6, body(6))
    assert actions == [Reset("3 messages before 6 are lost"), Apply(body(6))]
    assert sequence.on_replayed(1, 7, body(7)) == [Apply(body(7))]
    assert sequence.on_replayed(1, 8, body(8)) == [Apply(body(8))]
    assert sequence.on_replay_end(1) == [Apply(body(9))]


def test_full_resync_when_the_replay_fails() -> None:
    sequence = started()
    sequence.on_live(5, body(5))
    actions = sequence.on_replay_failed(1)
    assert actions == [Reset("2 messages before 5 are lost"), Apply(body(5))]
    assert sequence.counters.replays_failed == 1


def test_a_hole_in_the_answer_is_asked_for_again() -> None:
    sequence = started()
    sequence.on_live(9, body(9))
    sequence.on_replayed(1, 2, body(2))
    sequence.on_replayed(1, 3, body(3))
    assert sequence.on_replayed(1, 6, body(6)) == [Replay(2, 3)]
    assert sequence.on_replayed(1, 7, body(7)) == [], "of a replay that was stopped"
    sequence.on_replayed(2, 3, body(3))
    reset, apply = sequence.on_replayed(2, 6, body(6))  # and is still there
    assert isinstance(reset, Reset)
    assert apply == Apply(body(6))


def test_live_messages_wait_for_a_replay_in_bounds() -> None:
    sequence = EventSequence(can_replay=True, max_held=2)
    sequence.connected()
    for number in range(4):
        assert sequence.on_live(number, body(number)) == []
    assert sequence.on_replay_end(1) == [Replay(2, 0)], "the first two were given up"


def test_a_position_from_a_snapshot_goes_on() -> None:
    before = started()
    sequence = EventSequence(can_replay=True, position=before.position)
    assert sequence.connected() == [Replay(1, 2)]
    assert sequence.on_replayed(1, 2, body(2)) == []
    assert sequence.on_replayed(1, 3, body(3)) == [Apply(body(3))]
    assert isinstance(before.position, Position)


def test_a_check_finds_messages_lost_before_a_silence() -> None:
    sequence = started()
    assert sequence.check() == [Replay(1, 2)]
    assert sequence.check() == [], "one at a time"
    assert sequence.on_replayed(1, 2, body(2)) == []
    assert sequence.on_replayed(1, 3, body(3)) == [Apply(body(3))]


def test_without_a_replay_endpoint_a_snapshots_position_goes_on_with_the_next() -> None:
    sequence = EventSequence(can_replay=False, position=started(can_replay=False).position)
    assert sequence.connected() == []
    assert sequence.on_live(3, body(3)) == [Apply(body(3))]
    assert sequence.counters.resyncs == 0


def test_without_a_replay_endpoint_a_message_from_before_a_snapshot_is_another_lifes() -> None:
    sequence = EventSequence(can_replay=False, position=started(can_replay=False).position)
    reset, apply = sequence.on_live(1, body(1, "b"))
    assert isinstance(reset, Reset)
    assert apply == Apply(body(1, "b"))
    assert sequence.on_live(2, body(2, "b")) == [Apply(body(2, "b"))]
    assert sequence.counters.restarts == 1


def test_without_a_replay_endpoint_what_was_sent_after_a_snapshot_is_lost() -> None:
    sequence = EventSequence(can_replay=False, position=started(can_replay=False).position)
    actions = sequence.on_live(4, body(4))
    assert actions == [Reset("1 messages before 4 are lost"), Apply(body(4))]


@pytest.mark.security
def test_what_waited_for_a_replay_is_not_applied_all_at_once() -> None:
    """An engine that answers no replay would else hold the event loop with 10,000 messages."""
    sequence = EventSequence(can_replay=True, max_held=10_000)
    sequence.connected()
    for number in range(9_000):
        assert sequence.on_live(number, body(number)) == []
    applied: list[bytes] = []
    actions, next_number = sequence.on_replay_failed(1), 9_000
    while GoOn() in actions:
        assert len(actions) <= 65
        applied += [one.body for one in actions if isinstance(one, Apply)]
        for _ in range(32):  # no more come in one turn of the loop
            assert sequence.on_live(next_number, body(next_number)) == []
            next_number += 1
        assert sequence.check() == [], "a replay would bring what waits already"
        actions = sequence.go_on()
    applied += [one.body for one in actions if isinstance(one, Apply)]
    assert applied == [body(number) for number in range(next_number)]
    assert sequence.on_live(next_number, body(next_number)) == [Apply(body(next_number))]
