"""A stand-in for an engine over several nodes: `sim`, which serves while all other ranks are there.

The ranks meet as vLLM's do, at the master's address and port: those above 0 connect, and end when
rank 0 does. Rank 0 ends when one of them does, but waits for ever for one whose host is gone.
``install`` leaves it the way pip would: ``python -m tests.support.ranked_plugin`` is its process.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

import attrs

from commutator import (
    EngineClient,
    EngineConnector,
    EngineRegister,
    LaunchContext,
    LaunchPlan,
    hookimpl,
)
from commutator.engine import TokenApiClient
from commutator_engine_kit import engine_command, run_engine_process
from commutator_engine_kit.launching import NodeGroup
from commutator_sim.__main__ import build
from commutator_sim.config import SimConfig

__all__ = ["MODULE", "install"]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "tests.support.ranked_plugin"
_GROUP = "RANKED_GROUP"


@attrs.frozen(kw_only=True)
class RankedConfig(SimConfig):
    """The same options."""


class RankedConnector(EngineConnector[RankedConfig]):
    spans_nodes = True

    def launch_plan(self, config: RankedConfig, context: LaunchContext) -> LaunchPlan:
        assert context.group is not None
        plan = engine_command(MODULE, config, context)
        return attrs.evolve(plan, env={**plan.env, _GROUP: json.dumps(attrs.asdict(context.group))})

    def connect(self, config: RankedConfig, address: str) -> EngineClient:
        return TokenApiClient(address)


@hookimpl
def engine_register(register: EngineRegister) -> None:
    register("ranked", RankedConfig, RankedConnector())


def install(folder: Path) -> dict[str, str]:
    """Tell of the plugin in ``folder``; returns the environment that finds it."""
    info = folder / "ranked_plugin-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ranked-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[commutator]\nranked = {MODULE}\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def _lead(group: NodeGroup) -> None:
    """Wait for the other ranks; end this process when one of them ends."""
    server = socket.create_server((group.master_address, group.master_port))
    ranks: set[int] = set()
    while len(ranks) < group.nodes - 1:
        peer, _ = server.accept()
        ranks.add(int.from_bytes(peer.recv(1)))
        threading.Thread(target=_end_with, args=(peer,), daemon=True).start()
    assert ranks == set(range(1, group.nodes))


def _end_with(peer: socket.socket) -> None:
    try:
        peer.recv(1)
    finally:
        os._exit(1)


def _follow(group: NodeGroup) -> None:
    """Connect to rank 0, and stay as long as it does."""
    while True:
        try:
            leader = socket.create_connection((group.master_address, group.master_port), timeout=2)
        except OSError:
            time.sleep(0.1)
            continue
        leader.settimeout(None)
        leader.sendall(group.rank.to_bytes())
        leader.recv(1)
        sys.exit("rank 0 has ended")


def main() -> None:
    group = NodeGroup(**json.loads(os.environ[_GROUP]))
    if group.rank > 0:
        _follow(group)
    _lead(group)
    run_engine_process(SimConfig, build)


if __name__ == "__main__":
    main()
