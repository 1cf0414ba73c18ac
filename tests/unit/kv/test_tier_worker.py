"""What a tier's worker has one of, and the order in which it lets go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from tests.support.kv_rig import BLOCK_BYTES, BLOCK_TOKENS, IDENTITY, setups
from tests.support.kv_tiers import DRAM

from commutator.contract.tier import Memory
from commutator.errors import TransferTimeoutError
from commutator_engine_kit.kv.tiers import executor as tier_worker
from commutator_engine_kit.kv.tiers.block_io import Staging
from commutator_engine_kit.kv.tiers.executor import TierExecutor
from commutator_engine_kit.kv.tiers.guards import Bandwidth, IoGuards
from commutator_engine_kit.kv.tiers.mover import GPU_COPIES
from commutator_engine_kit.kv.tiers.setup import TierSetup, build_io
from commutator_engine_kit.nixl.agent import TransferAgent


def worker_of(**options: Any) -> TierExecutor:
    (setup,) = setups({**DRAM, **options})
    return worker_of_setup(setup)


def worker_of_setup(setup: TierSetup, memory: Memory = Memory.DRAM) -> TierExecutor:
    staging = Staging(BLOCK_BYTES, 4)
    return TierExecutor(
        setup,
        evolve(staging.arena, memory=memory),
        staging,
        block_tokens=BLOCK_TOKENS,
        identity=IDENTITY.digest.hex(),
        agent_name="worker",
        on_open=lambda _: None,
    )


def test_a_tier_is_not_closed_while_nixl_still_moves_its_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = worker_of()
    worker.open()
    tier, close = worker.setup.tier, TransferAgent.close
    closed: list[str] = []

    def still_moving(agent: TransferAgent, timeout_s: float = 5.0) -> None:
        raise TransferTimeoutError("transfers did not end", 1)

    def closes(agent: TransferAgent, timeout_s: float = 5.0) -> None:
        closed.append("agent")
        close(agent, timeout_s)

    monkeypatch.setattr(TransferAgent, "close", still_moving)
    for _ in range(3):
        with pytest.raises(TransferTimeoutError):
            worker.open()
        assert not worker.is_open
        assert tier.statistics().capacity, "the tier is open as before"
    monkeypatch.setattr(TransferAgent, "close", closes)
    worker.open()
    assert "agent" in closed
    assert worker.is_open
    worker.close()


def test_the_limit_of_bytes_per_second_is_one_for_the_engine_and_for_other_tiers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[IoGuards] = []

    def noted(*arguments: Any) -> Any:
        limits.append(arguments[-1])
        return build_io(*arguments)

    monkeypatch.setattr(tier_worker, "build_io", noted)
    worker = worker_of(max_bytes_per_s="1MB")
    worker.open()
    worker.close()
    assert len(limits) == 2
    assert limits[0].bandwidth == Bandwidth(1_000_000)
    assert limits[0] is limits[1]


@pytest.mark.parametrize("memory", [Memory.DRAM, Memory.VRAM])
@pytest.mark.parametrize("kind", ["dram", "nvme", "peer"])
def test_agents_that_copy_gpu_memory_watch_for_no_peers_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str, memory: Memory
) -> None:
    """On a machine without a GPU: of NIXL only what it would be asked for."""
    made: dict[str, dict[str, Any]] = {}

    class Agent:
        def __init__(self, name: str, backends: dict[str, Any]) -> None:
            made[name] = backends

        def register(self, regions: object, backend: str) -> None: ...
        def close(self) -> None: ...

    monkeypatch.setattr(tier_worker, "TransferAgent", Agent)
    options = {"dram": DRAM, "nvme": {"kind": "nvme", "path": str(tmp_path), "capacity": "1MB"}}
    (setup,) = setups(options.get(kind, {"kind": kind}))
    if setup.tier.asks_peers:
        setup.tier.use_peers(list)
    worker = worker_of_setup(setup, memory)
    worker.open()
    worker.close()
    copying = {name for name, backends in made.items() if backends["UCX"] == GPU_COPIES}
    if memory is Memory.DRAM:
        assert copying == set()
    else:
        assert copying == ({"worker-local"} if kind == "peer" else set(made))
    assert "worker" in made
