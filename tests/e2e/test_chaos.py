"""Random faults under steady traffic: nothing is lost, nothing is wrong, nothing leaks.

`CHAOS_S` is the length of a run in seconds, `CHAOS_SEED` its seed; `make chaos` runs an hour of
each kind. The layout is that of test_cluster_faults.py; KV events go over NATS with `sim`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from attrs import frozen
from tests.support.chaos import CONVERGED_S, LOADED_S, Chaos, Class
from tests.support.chaos_plan import Places, plan
from tests.support.clocks import Clocks
from tests.support.cluster_views import COMMUTATOR, Demo, running
from tests.support.hosts import Host, why_not
from tests.support.processes import command_of
from tests.support.steady_traffic import SteadyTraffic, stream
from tests.support.vitals import Vitals, say

CHAOS_S = float(os.environ.get("CHAOS_S", "150"))
SEED = int(os.environ.get("CHAOS_SEED", "1"))
LOGS = os.environ.get("CHAOS_LOGS")
"""A folder that keeps the cluster's logs."""
NO_HOSTS = why_not() or (None if Path("/dev/net/tun").exists() else "no /dev/net/tun")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(NO_HOSTS is not None, reason=NO_HOSTS or ""),
    pytest.mark.timeout(2 * CHAOS_S + 1200),
]
STORY = "Tell me about the river, and the tower at it, whose bell rings at noon. "


@frozen(kw_only=True)
class Shape:
    """The engine and its traffic; the load is low, so that what is late is not the machine."""

    options: Mapping[str, object]
    kv: str
    nats: bool
    prompts: int
    repeated: int
    """How often each prompt repeats its story, which makes it long."""
    tokens: int
    per_s: float
    rest_s: tuple[float, float]
    """Between faults."""
    tiers: bool = False


SHAPES = {
    # An answer takes 3 s. Prompts are more than fit, so that blocks come and go all the time.
    "sim": Shape(
        options={"decode_base_s": 0.02, "kv_capacity_blocks": 512},
        kv="",
        nats=True,
        prompts=48,
        repeated=12,
        tokens=150,
        per_s=2.0,
        rest_s=(8.0, 15.0),
    ),
    "reference": Shape(
        options={"kv_cache_bytes": 30_000_000},
        kv="tiers: [{kind: dram, capacity: 40MB}, "
        "{kind: nvme, path: 'tiers/{worker}', capacity: 200MB}]\n",
        nats=False,
        prompts=24,
        repeated=10,
        tokens=20,
        per_s=0.2,
        rest_s=(20.0, 40.0),
        tiers=True,
    ),
}


@contextmanager
def cluster(kind: str, clocks: Clocks) -> Iterator[Demo]:
    shape = SHAPES[kind]
    with running(
        kind, "etcd", etcd_apart=True, nats=shape.nats, options=shape.options, kv=shape.kv
    ) as demo:
        for host in demo.hosts:
            demo.env[host.name] = clocks.env_of(host.name)
        try:
            demo.start()
            yield demo
        finally:
            if LOGS is not None:
                for log in demo.folder.glob("*.log"):
                    shutil.copy(log, LOGS)


@pytest.mark.parametrize("kind", SHAPES)
def test_nothing_is_lost_in_chaos(kind: str, tmp_path: Path) -> None:
    clocks, shape = Clocks(tmp_path), SHAPES[kind]
    say(f"chaos with {kind} workers: CHAOS_S={CHAOS_S:g} CHAOS_SEED={SEED}")
    with cluster(kind, clocks) as demo, Vitals(demo) as vitals:
        h1, h2, h3 = demo.hosts
        prompts = [f"{number}. {STORY * shape.repeated}" for number in range(shape.prompts)]
        with ThreadPoolExecutor(4) as pool:
            ask = partial(stream, h2.address, tokens=shape.tokens)
            answers = list(pool.map(ask, prompts))
        assert [one.problem for one in answers] == [""] * len(prompts)
        expected = {one.prompt: one.text for one in answers}
        places = Places(
            doors=(h1.name, h2.name),
            workers=(h2.name, h3.name),
            etcd=[host.name for host in demo.etcd_hosts],
            nats=[] if demo.nats_host is None else [demo.nats_host.name],
            spared=h2.name,
        )
        faults = plan(SEED, CHAOS_S, places, shape.rest_s)
        say(f"{len(faults)} faults in {CHAOS_S:g} s")
        chaos = Chaos(demo, clocks)
        chaos.run(
            faults,
            lambda: SteadyTraffic(
                [h1.address, h2.address], expected, shape.per_s, tokens=shape.tokens
            ),
            expected,
            round_s=600.0,
            length_s=CHAOS_S,
        )
        if shape.tiers:
            verify_tiers(h1)
        chaos.summary()
        vitals.say_cpu()
        grown = vitals.grown()
        tracebacks = chaos.tracebacks()
        demo.stop()
        left = [command_of(pid) for host in (*demo.hosts, *demo.others) for pid in host.pids()]
    assert chaos.outcomes[Class.LOST] == chaos.outcomes[Class.WRONG] == 0, chaos.problems
    assert chaos.outcomes[Class.REFUSED] == 0, chaos.problems
    assert chaos.outcomes[Class.EQUAL] > 0
    assert chaos.late == []
    for one in chaos.healings:
        assert one.views_s < CONVERGED_S + LOADED_S + one.starved_s
    assert grown == []
    assert tracebacks == 0
    assert left == [], "processes that nobody stopped"


def verify_tiers(door: Host) -> None:
    """Every block that a tier stores is what was stored."""
    argv = [str(COMMUTATOR), "kv", "verify", "--url", f"http://{door.address}:8000", "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    say(f"commutator kv verify: {done.stdout}{done.stderr}")
    assert done.returncode == 0
