"""The process that talks to Ray: ``python -m commutator_ray.driver ADDRESS NAMESPACE``.

Ray ends a driver that has lost the head for a minute. In a process of its own, that does not end
the supervisor and its front doors. It reads questions from standard input and writes answers to
standard output, a line of JSON each: ``[number, name, arguments]`` and ``[number, ok, result]``. It
ends with its input.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TextIO

import ray
from ray.util import list_named_actors, placement_group_table
from ray.util.placement_group import (
    PlacementGroup,
    get_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from commutator.contract.launcher import AgentState
from commutator_ray.actor import AgentActor

_STATUS_S = 2.0
"""Longest wait for what actors say."""
_EXIT_S = 10.0
"""What an agent's host may take beyond the agent's grace."""
_RANK_GRACE_S = 10.0
"""What ranks above 0 may take to end after rank 0, which drains."""
_GONE_S = 20.0
"""Longest wait until Ray has forgotten an actor."""
_MARK = "@"
"""Between an agent's name, its generation and the rank, if not 0, in the name of an actor."""
_THREADS = 32


class Driver:
    """What the supervisor asks for. Each method may be called from any thread."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._prefix = f"{namespace}/"
        self._own: dict[str, Any] = {}
        """Actors that are not detached: Ray ends one that nobody has a handle of."""

    def agents(self) -> list[dict[str, Any]]:
        """The fields of a ``PlacedAgent`` for each agent."""
        actors, groups = self._actors(), self._groups()
        said = self._said(actors)
        found = []
        for full in sorted({*map(_first_of, actors), *groups}):
            name, _, generation = full.partition(_MARK)
            fields: dict[str, Any] = {"name": name, "generation": generation}
            ranks = _ranks_of(full, groups.get(full, 1))
            if not actors.issuperset(ranks):  # placed half: the others were never made
                fields |= {"generation": "", "state": "waiting"}
            elif all(rank in said for rank in ranks):
                fields |= _together([said[rank] for rank in ranks])
            else:
                fields |= {"state": "waiting", "cause": self._waits_for(full)}
            found.append(fields)
        return found

    def place(self, plan: Mapping[str, Any], bundle: dict[str, float], detached: bool) -> None:
        """Reserve nodes' resources, and have actors started there; see ``AgentLauncher``.

        Unless ``detached``, Ray ends both when this process ends.
        """
        lifetime = "detached" if detached else None
        full = f"{plan['name']}{_MARK}{plan['generation']}"
        ranks = _ranks_of(full, plan["nodes"])
        there = self._actors()
        if there.issuperset(ranks):
            return
        group = self._group(full) or placement_group(
            [bundle] * len(ranks),
            strategy="STRICT_SPREAD",
            name=self._prefix + full,
            lifetime=lifetime,
        )
        others = {name: amount for name, amount in bundle.items() if name not in ("CPU", "GPU")}
        for rank, name in enumerate(ranks):
            if name in there:
                continue
            actor = (
                ray.remote(AgentActor)
                .options(
                    name=name,
                    namespace=self._namespace,
                    lifetime=lifetime,
                    get_if_exists=True,
                    max_restarts=-1,
                    max_task_retries=0,
                    # `status` and other ranks are answered while `stop` waits.
                    max_concurrency=4 + len(ranks),
                    num_cpus=bundle.get("CPU", 0),
                    num_gpus=bundle.get("GPU", 0),
                    resources=others,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(
                        placement_group=group, placement_group_bundle_index=rank
                    ),
                )
                .remote(dict(plan), rank, full)
            )
            if not detached:
                self._own[name] = actor

    def remove(self, name: str, grace_s: float) -> None:
        """End an agent of any generation; see ``AgentLauncher``."""
        actors = {full for full in self._actors() if full.partition(_MARK)[0] == name}
        groups = {full for full in self._groups() if full.partition(_MARK)[0] == name}
        firsts = {full for full in actors if full == _first_of(full)}
        self._end(firsts, grace_s)
        self._end(actors - firsts, min(grace_s, _RANK_GRACE_S))
        for full in groups:
            if (group := self._group(full)) is not None:
                remove_placement_group(group)
        deadline_s = time.monotonic() + _GONE_S
        while actors & self._actors() or groups & self._groups().keys():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray still lists {name} after {_GONE_S:g} s")
            time.sleep(0.1)

    def _end(self, actors: set[str], grace_s: float) -> None:
        """End the agents of these actors, and the actors."""
        handles = {full: ray.get_actor(full, self._namespace) for full in actors}
        # The others are killed at once; the guard on the node ends what they have started.
        asked = [handles[full].stop.remote(grace_s) for full in self._said(actors)]
        if asked:
            ray.wait(asked, num_returns=len(asked), timeout=grace_s + _EXIT_S)
        for full, actor in handles.items():
            ray.kill(actor, no_restart=True)
            self._own.pop(full, None)

    def _actors(self) -> set[str]:
        return {
            one["name"]
            for one in list_named_actors(all_namespaces=True)
            if one["namespace"] == self._namespace
        }

    def _groups(self) -> dict[str, int]:
        """The placement groups, by the name of the first actor, and how many nodes each has."""
        return {
            str(one["name"]).removeprefix(self._prefix): len(one["bundles"])
            for one in placement_group_table().values()
            if one["state"] != "REMOVED" and str(one["name"]).startswith(self._prefix)
        }

    def _group(self, full: str) -> PlacementGroup | None:
        try:
            return get_placement_group(self._prefix + full)
        except ValueError:
            return None

    def _said(self, actors: set[str]) -> dict[str, dict[str, Any]]:
        """What the actors that answer say of their agents."""
        asked = {}
        for full in actors:
            try:
                asked[ray.get_actor(full, self._namespace).status.remote()] = full
            except ValueError:  # it has just ended
                continue
        answered, _ = (
            ray.wait(list(asked), num_returns=len(asked), timeout=_STATUS_S) if asked else ([], [])
        )
        said = {}
        for one in answered:
            try:
                said[asked[one]] = ray.get(one)
            except ray.exceptions.RayError:  # it is being restarted
                continue
        return said

    def _waits_for(self, full: str) -> str:
        for one in placement_group_table().values():
            if one["name"] == self._prefix + full and one["state"] in ("PENDING", "RESCHEDULING"):
                wanted = ", ".join(
                    f"{amount:g} {name}" for name, amount in sorted(one["bundles"][0].items())
                )
                nodes = len(one["bundles"])
                if nodes > 1:
                    return f"there are no {nodes} nodes of the Ray cluster with {wanted} free"
                return f"no node of the Ray cluster has {wanted} free"
        return "Ray is starting it, or its node does not answer"


def _ranks_of(first: str, nodes: int) -> list[str]:
    """The names of the actors of an agent, by rank."""
    return [first, *(f"{first}{_MARK}{rank}" for rank in range(1, nodes))]


def _first_of(full: str) -> str:
    """The name of rank 0's actor."""
    return _MARK.join(full.split(_MARK)[:2])


def _together(said: list[dict[str, Any]]) -> dict[str, Any]:
    """What the actors of one agent say, by rank, as if it were one."""
    failed = [one for one in said if one["state"] == AgentState.FAILED.value]
    cause = next((one["cause"] for one in failed or said if one["cause"] is not None), None)
    state = AgentState.FAILED.value if failed else said[0]["state"]
    return {"state": state, "cause": cause, "host": said[0]["host"]}


def serve(driver: Driver, questions: TextIO, answers: TextIO) -> None:
    """Answer questions until there are no more, several at a time."""
    lock = threading.Lock()

    def answer(number: int, method: Callable[..., Any], arguments: list[Any]) -> None:
        try:
            ok, result = True, method(*arguments)
        except Exception as error:  # noqa: BLE001 - Ray raises anything; the supervisor is told
            ok, result = False, " ".join(f"{type(error).__name__}: {error}".split())
        with lock:
            answers.write(json.dumps([number, ok, result]) + "\n")
            answers.flush()

    methods: Mapping[str, Callable[..., Any]] = {
        "agents": driver.agents,
        "place": driver.place,
        "remove": driver.remove,
    }
    with ThreadPoolExecutor(_THREADS) as pool:
        for line in questions:
            number, name, arguments = json.loads(line)
            pool.submit(answer, number, methods[name], arguments)


def main() -> None:
    address, namespace = sys.argv[1:]
    # What Ray prints must not get among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level="ERROR")
    except Exception as error:  # noqa: BLE001 - Ray raises anything; the supervisor is told
        text = " ".join(f"{type(error).__name__}: {error}".split())
        answers.write(json.dumps([0, False, text]) + "\n")
        answers.flush()
        sys.exit(1)
    # Ray's handler would print a traceback when a job is stopped; this process ends with its input.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    answers.write(json.dumps([0, True, None]) + "\n")
    answers.flush()
    serve(Driver(namespace), sys.stdin, answers)
    os._exit(0)  # Ray's own threads would wait for a head that may be gone


if __name__ == "__main__":
    main()
