"""The next steps in situations that people know; random ones are in ``tests/property/rollout``."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import evolve

from commutator_rollout.steps import Cancel, Drain, Phase, Rules, Start, Want, Worker, steps

WANT = Want(engine="w", group="m", generation="1", replicas=2)


def workers(count: int, phase: Phase = Phase.READY, **more: str) -> list[Worker]:
    engine = more.get("engine", "w")
    generation = more.get("generation", "1")
    return [
        Worker(worker_id=f"{engine}{generation}-{number}", engine=engine, group="m",
               generation=generation, phase=phase)
        for number in range(count)
    ]  # fmt: skip


def now(wants: Sequence[Want], there: Sequence[Worker], rules: Rules | None = None) -> list[object]:
    return list(steps(wants, there, rules or Rules()).now)


def test_what_runs_as_wanted_is_left_alone() -> None:
    assert steps([WANT], workers(2)) == steps([WANT], workers(2))
    assert steps([WANT], workers(2)).settled
    assert not steps([WANT], workers(2, Phase.STARTING)).settled


def test_more_are_started_at_once_and_fewer_drain_at_once() -> None:
    assert now([evolve(WANT, replicas=5)], workers(2)) == [Start("w")] * 3
    assert now([evolve(WANT, replicas=1)], workers(3)) == [Drain("w1-2"), Drain("w1-1")]
    starting = evolve(workers(1, Phase.STARTING)[0], worker_id="w1-9")
    assert now([WANT], [*workers(2), starting]) == [Cancel("w1-9")]


def test_a_new_worker_is_ready_before_an_old_one_drains() -> None:
    new = evolve(WANT, generation="2")
    assert now([new], workers(2)) == [Start("w")]
    assert now([new], [*workers(2), *workers(1, Phase.STARTING, generation="2")]) == []
    assert now([new], [*workers(2), *workers(1, generation="2")]) == [Drain("w1-0")]


def test_a_renamed_entry_takes_over_and_a_removed_model_drains() -> None:
    new = evolve(WANT, engine="v")
    assert now([new], workers(2)) == [Start("v")]
    assert now([new], [*workers(2), *workers(1, engine="v")]) == [Drain("w1-0")]
    assert now([], workers(2)) == [Drain("w1-0"), Drain("w1-1")]


def test_without_surge_one_drains_first() -> None:
    new, rules = evolve(WANT, generation="2"), Rules(surge=0)
    assert now([new], workers(2), rules) == [Drain("w1-0")]
    draining = [evolve(workers(1)[0], phase=Phase.DRAINING), workers(2)[1]]
    assert now([new], draining, rules) == [Start("w")]


def test_the_last_ready_worker_is_not_drained_to_make_room() -> None:
    new, old = evolve(WANT, generation="2", replicas=1), workers(1)
    found = steps([new], old, Rules(surge=0))
    assert not found.now
    assert "last ready worker of m" in found.waits[0]
    assert now([new], old, Rules(surge=0, may_interrupt=True)) == [Drain("w1-0")]


def test_what_people_drained_counts_and_goes_first() -> None:
    held = [evolve(workers(1)[0], phase=Phase.HELD), workers(2)[1]]
    assert now([WANT], held) == []
    assert now([evolve(WANT, replicas=1)], held) == [Cancel("w1-0")]


def on(worker: Worker, *devices: int, phase: Phase = Phase.READY) -> Worker:
    return evolve(worker, devices=devices, phase=phase)


def test_two_workers_of_two_gpus_become_four_of_one() -> None:
    """Never is a GPU given away that is in use, and never does a worker get none."""
    old = [on(one, 2 * number, 2 * number + 1) for number, one in enumerate(workers(2))]
    four = Want(engine="w", group="m", generation="2", replicas=4,
                device_sets=((0,), (1,), (2,), (3,)))  # fmt: skip
    assert now([four], old) == [Drain("w1-0")]
    leaving = [on(old[0], 0, 1, phase=Phase.DRAINING), old[1]]
    assert now([four], leaving) == [], "0 and 1 are its own until it has ended"
    assert now([four], [old[1]]) == [Start("w", (0,)), Start("w", (1,))]
    new = [on(one, number) for number, one in enumerate(workers(2, generation="2"))]
    assert now([four], [old[1], *new]) == [Drain("w1-1")]


def test_a_free_gpu_is_used_before_anything_drains() -> None:
    old = [on(one, number) for number, one in enumerate(workers(2))]
    new = evolve(WANT, generation="2", device_sets=((0,), (2,)))
    assert now([new], old) == [Start("w", (2,))]


def test_entries_that_share_a_gpu_by_choice_do_so() -> None:
    other = Want(engine="v", group="n", generation="1", replicas=1, device_sets=((0,),))
    mine = evolve(WANT, replicas=1, device_sets=((0,),))
    assert now([mine, other], [on(workers(1)[0], 0)]) == [Start("v", (0,))]


def test_workers_of_a_planner_are_replaced_and_not_counted() -> None:
    planned = evolve(WANT, replicas=None, generation="2")
    assert now([planned], workers(3)) == [Drain("w1-0")]
    assert now([evolve(WANT, replicas=None)], workers(7)) == []
